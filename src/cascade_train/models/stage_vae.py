"""A KL autoencoder as what trains: images to latents, as a normal distribution, and back.

Must not live here: its losses (tasks/autoencoder_kl.py), and the autoencoder as a frozen part (autoencoder_kl.py).

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from cascade_train.models.autoencoder_kl import kl_arguments
from cascade_train.models.formats.autoencoder_kl import read_vae, save_vae
from cascade_train.models.formats.weights import put_tensors
from cascade_train.models.initialize import initialise, torch_rule
from cascade_train.models.stage import AutoencoderStage, Images, Save
from cascade_train.options import File


@dataclass(kw_only=True, eq=False)
class VAEStage(AutoencoderStage):
    """Diffusers' `AutoencoderKL` (Rombach et al. 2022, section 3.1). It has no captions, and denoises nothing.

    Options are named as diffusers names them.

    Args:
        random_encoders: there are none beside the network; here so that `debug=random_weights` fits every model.
        weights: folder of diffusers or hub id, a pipeline's or its own; a run; or a single file, of diffusers' names or
            the original's, with other parts in it or without; null = from scratch.
        scaling_factor: what latents are multiplied by for the model that is trained on them; written into the export.
        latent_channels: channels of the latent.
        block_out_channels: width of each level; the stride is 2 to the power of one less than their number.
        layers_per_block: residual blocks of each level.
        norm_num_groups: groups of every norm.

    Raises:
        ValueError: an image size that does not divide, a scaling factor that is not above 0, or widths that do not
            divide into groups.
    """

    name = "vae"
    abilities = frozenset({"kl_autoencoder"})
    part = "vae"
    latent_name = "latent"

    image_size: int
    precision: Literal["bf16", "fp32"]
    seed: int
    random_encoders: bool
    weights: File[str | None]
    scaling_factor: float
    latent_channels: int
    block_out_channels: list[int]
    layers_per_block: int
    norm_num_groups: int

    def __post_init__(self) -> None:
        self.arguments = kl_arguments(self, key="model")
        self.image_multiple = stride = 2 ** (len(self.block_out_channels) - 1)
        if self.image_size < stride or self.image_size % stride:
            raise ValueError(
                f"model.image_size={self.image_size}: must be a multiple of {stride} pixels, the stride of the "
                "autoencoder"
            )

    def build(self, *, device: torch.device, network_dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
        """Make the network on the meta device, then load or initialise it on `device`."""
        from cascade_train.models.networks.kl_network import KLNetwork  # heavy: diffusers

        with torch.device("meta"):
            network = KLNetwork(**self.arguments)
        if self.weights is None:
            initialise(network, torch_rule(network), device=device, dtype=network_dtype, seed=self.seed)
        else:
            values = read_vae(self.weights, self.arguments, key="model.weights")
            origin = f"model.weights={self.weights}"
            put_tensors(network, values, dtype=network_dtype, device=device, origin=origin)
        self.network = network.train()

    @torch.no_grad()
    def encode(self, images: Images) -> Tensor:
        """Encode (B, 3, H, W) float in [0, 1] to the means of the latents, (B, C, H / stride, W / stride) fp32."""
        if not isinstance(images, Tensor):
            raise AssertionError("nothing that an autoencoder which trains makes of images can be cached")
        return self.scaling_factor * self.network(images, only="encode")

    @torch.no_grad()
    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode latents (B, C, H, W) to (B, 3, stride H, stride W) fp32 in [0, 1]."""
        return self.network(latent_BCHW / self.scaling_factor, only="decode").clamp(0, 1)

    def set_attention(self, name: str) -> None:
        """Choose the attention kernel of the network, see `attention.set_attention`."""
        self.network.set_attention(name)

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute the levels in backward instead of keeping their activations."""
        self.network.set_recomputing(enabled)

    def exports(self) -> Mapping[str, Save]:
        """Return `vae`, a folder that diffusers loads."""
        return {self.part: partial(save_vae, self.arguments)}
