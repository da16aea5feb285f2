"""Stage A: images to latents with a codebook, and back.

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.latent_codec import CODES, ORIGINAL_CODES, VQOptions, plain_vqgan, vq_layout
from cascade_train.models.formats.export import quiet, read_back_error, reconstruction, replaced_directory, save_model
from cascade_train.models.formats.weights import load_module
from cascade_train.models.initialize import initialise
from cascade_train.models.stage import AutoencoderStage, Images, Save

STAGE_A_FILE = "stage_a.safetensors"
"""The original's name of Stage A's file."""


@dataclass(kw_only=True, eq=False)
class StageA(VQOptions, AutoencoderStage):
    """Stage A of Stable Cascade, at any size. It has no captions, and denoises nothing.

    Args:
        weights: of the network: hub id, local folder of diffusers, run, or single file, with the original's names or
            diffusers'; null = from scratch.
        scale_factor: what latents are divided by for Stage B; written into the export.
    """

    family = CASCADE
    name = "stage_a"
    abilities = frozenset({"vq_autoencoder"})
    part = "vqgan"
    latent_name = "vq_latent"

    def __post_init__(self) -> None:
        self.arguments = self.vq_arguments(key="model")
        self.image_multiple = 2**self.levels
        self._check_image_size("2 to the power of model.levels")

    def build(self, *, device: torch.device, network_dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
        """Make the network on the meta device, then load or initialise it on `device`; statistics of norms are fp32."""
        from cascade_train.models.cascade.networks.vq_network import VQNetwork, vq_rule  # heavy: diffusers

        with torch.device("meta"):
            network = VQNetwork(**self.arguments)
        if self.weights is None:
            initialise(network, vq_rule, device=device, dtype=torch.float32, seed=self.seed)
        else:
            where = {"device": device, "key": "model.weights", "part": self.part}
            load_module(network, self.weights, dtype=torch.float32, layout=vq_layout, **where)
        for parameter in network.parameters():
            parameter.data = parameter.data.to(network_dtype)
        self.network = network.train()

    @torch.no_grad()
    def encode(self, images: Images) -> Tensor:
        """Encode images (B, 3, H, W) float in [0, 1] to (B, C, H / stride, W / stride) fp32, by the scale factor."""
        return self.network(images, only="encode") / self.scale_factor

    @torch.no_grad()
    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode latents (B, C, H, W), by the scale factor, to (B, 3, stride H, stride W) fp32 in [0, 1]."""
        return self.network(latent_BCHW * self.scale_factor, only="decode").clamp(0, 1)

    def exports(self) -> Mapping[str, Save]:
        """Return `vqgan`, a folder that diffusers loads, and `stage_a`, the original's file."""
        return {self.part: self._save_folder, "stage_a": self._save_file}

    def _save_folder(self, state: Mapping[str, Tensor], directory: Path) -> float:
        return save_model(plain_vqgan(self.arguments, state), directory, reconstruction)

    def _save_file(self, state: Mapping[str, Tensor], directory: Path) -> float:
        model = plain_vqgan(self.arguments, state)
        tensors = {name.replace(CODES, ORIGINAL_CODES): each.contiguous() for name, each in state.items()}
        with replaced_directory(directory) as place, quiet():
            save_file(tensors, place / STAGE_A_FILE, metadata={"format": "pt"})
            stored = load_file(place / STAGE_A_FILE)
            found = {name: stored[each.name] for name, each in vq_layout(stored).items()}
            loaded = plain_vqgan(self.arguments, found)
            return read_back_error(model, loaded, directory, reconstruction)
