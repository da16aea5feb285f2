"""Stage A: images to latents with a codebook, and back.

Lives here: which network makes up the stage, and how images become latents. Must not live here: the network
(vq_network.py), its losses (tasks/vqgan.py), and Stage A as a frozen part of Stage B (latent_codec.py).

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cascade_train.models.formats.weights import load_module
from cascade_train.models.initialize import initialise
from cascade_train.models.latent_codec import ORIGINAL_NAMES
from cascade_train.models.stage import Conditions, Images, Stage, Tokens
from cascade_train.options import File


class StageA(Stage):
    """Stage A of Stable Cascade, at any size. It has no captions, and denoises nothing.

    Args:
        random_encoders: there are none beside the network; here so that `debug=random_weights` fits every model.
        weights: of the network: hub id, local folder of diffusers, run, or single file, with the original's names or
            diffusers'; null = from scratch.
        scale_factor: what latents are divided by for Stage B; written into the export.
        levels: levels, each of half the resolution; the stride is 2 to this power.
        bottleneck_blocks: residual blocks at the lowest resolution of the decoder.
        embed_dim: width at the lowest resolution.
        latent_channels: channels of the latent.
        num_vq_embeddings: entries of the codebook.

    Raises:
        ValueError: an image size that does not divide, or a scale factor that is not above 0.
    """

    name = "stage_a"
    part = "vqgan"
    denoises = False
    image_keep_prob = 0.0
    needs_image = True
    latent_name = "vq_latent"
    why_not_cached = "its encoder trains"

    def __init__(
        self,
        *,
        image_size: int,
        precision: Literal["bf16", "fp32"],
        seed: int,
        random_encoders: bool,
        weights: File[str | None],
        scale_factor: float,
        levels: int,
        bottleneck_blocks: int,
        embed_dim: int,
        latent_channels: int,
        num_vq_embeddings: int,
    ) -> None:
        stride = 2**levels
        if image_size < stride or image_size % stride:
            raise ValueError(
                f"model.image_size={image_size}: must be a multiple of {stride} pixels, 2 to the power of model.levels"
            )
        if not scale_factor > 0.0:
            raise ValueError(f"model.scale_factor={scale_factor}: latents are divided by it; set it above 0")
        self.image_size = image_size
        self.precision = precision
        self.seed = seed
        self.weights = weights
        self.scale_factor = scale_factor
        self.image_multiple = stride
        self.latent_channels = latent_channels
        self.codes = num_vq_embeddings
        self.arguments = {
            "levels": levels,
            "bottleneck_blocks": bottleneck_blocks,
            "embed_dim": embed_dim,
            "latent_channels": latent_channels,
            "num_vq_embeddings": num_vq_embeddings,
            "scale_factor": scale_factor,
        }
        self.network: Any

    def build(self, *, device: torch.device, network_dtype: torch.dtype, frozen_dtype: torch.dtype) -> None:
        """Make the network on the meta device, then load or initialise it on `device`."""
        from cascade_train.models.vq_network import VQNetwork, vq_rule  # heavy: diffusers

        with torch.device("meta"):
            network = VQNetwork(**self.arguments)
        if self.weights is None:
            initialise(network, vq_rule, device=device, dtype=network_dtype, seed=self.seed)
        else:
            where = {"device": device, "key": "model.weights", "part": self.part}
            load_module(network, self.weights, dtype=network_dtype, renamed=ORIGINAL_NAMES, **where)
        self.network = network.train()

    def frozen_modules(self) -> dict[str, nn.Module]:
        """Return nothing: the task decides whether encoder and decoder train."""
        return {}

    def tokenize(self, captions: Sequence[str]) -> Tokens:
        """Return nothing: captions are not seen."""
        return {}

    def conditions(
        self,
        tokens: Tokens,
        images: Images | None = None,
        keep_image_B: Tensor | None = None,
        drawn: Any = None,
    ) -> Conditions:
        """Return nothing: the network is conditioned on nothing."""
        return {}

    @torch.no_grad()
    def encode(self, images: Images) -> Tensor:
        """Encode images (B, 3, H, W) float in [0, 1] to (B, C, H / stride, W / stride) fp32, by the scale factor."""
        if not isinstance(images, Tensor):
            raise AssertionError("nothing that Stage A makes of images can be cached")
        return self.network(images, only="encode") / self.scale_factor

    @torch.no_grad()
    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode latents (B, C, H, W), by the scale factor, to (B, 3, stride H, stride W) fp32 in [0, 1]."""
        return self.network(latent_BCHW * self.scale_factor, only="decode").clamp(0, 1)

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (C, H, W) of the latent of an image of `height` x `width` pixels."""
        return self.latent_channels, height // self.image_multiple, width // self.image_multiple

    def units(self) -> list[list[nn.Module]]:
        """Return the network's residual blocks, in execution order."""
        return self.network.units()

    def set_attention(self, name: str) -> None:
        """Choose nothing: the network is convolutional."""

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute the activations of each residual block in backward instead of keeping them."""
        self.network.recompute = enabled
