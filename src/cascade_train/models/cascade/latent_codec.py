"""Stage A as Stage B sees it: a frozen map between images and the latents that Stage B models, both ways.

Shape legend: B batch, C channels, H W image or latent size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from cascade_train.models.family import Stored
from cascade_train.models.formats.export import module_around
from cascade_train.models.formats.weights import load_module
from cascade_train.models.frozen_part import LatentCodec
from cascade_train.options import File, Positive, check_blocks, check_fields

CODES, ORIGINAL_CODES = "vquantizer.embedding.", "vquantizer.codebook."
"""Beginnings of the only names that diffusers and the original spell differently."""


def vq_layout(stored_names: Iterable[str]) -> dict[str, Stored]:
    """Lay out Stage A, which is stored under diffusers' names or the original's."""
    return {name.replace(ORIGINAL_CODES, CODES): Stored(name) for name in stored_names}


@dataclass(kw_only=True, eq=False)
class VQOptions:
    """Options of Stage A's network.

    Args:
        scale_factor: what latents are divided by.
        levels: levels, each of half the resolution; the stride is 2 to this power.
        bottleneck_blocks: residual blocks at the lowest resolution of the decoder.
        embed_dim: width at the lowest resolution.
        latent_channels: channels of the latent.
        num_vq_embeddings: entries of the codebook.
    """

    scale_factor: Positive[float]
    levels: int
    bottleneck_blocks: int
    embed_dim: int
    latent_channels: int
    num_vq_embeddings: int

    def vq_arguments(self, *, key: str) -> dict[str, Any]:
        """Return the arguments of diffusers' `PaellaVQModel`; ConfigErrors name `key`."""
        check_fields(self, f"{key}.")
        for name in ("bottleneck_blocks", "levels"):
            check_blocks(f"{key}.{name}", getattr(self, name))
        return {field.name: getattr(self, field.name) for field in fields(VQOptions)}


@dataclass(kw_only=True, eq=False)
class VQGAN(VQOptions, LatentCodec):
    """The original's Stage A: diffusers' `PaellaVQModel`, whose latents are not quantised (modules/stage_a.py).

    Args:
        weights: local safetensors file or folder, or a hub id (`owner/name:file` or `owner/name:subfolder`), with the
            original's names or diffusers'; null = values from a fixed seed.
        scale_factor: what latents are divided by. Stage B was trained with 0.43; folders of diffusers often say 0.3764,
            which belongs to another model, so that the number is given here and never read from them.
    """

    key = "stage_a"
    folder = "vqgan"
    in_pipelines = True

    weights: File[str | None]

    def __post_init__(self) -> None:
        self.arguments = self.vq_arguments(key="stage_a")
        self.stride = 2**self.levels

    def _make(self) -> tuple[nn.Module, float]:
        return plain_vqgan(self.arguments, None), 1.0

    def _load(self, module: nn.Module, weights: str, **where: Any) -> None:
        load_module(module, weights, part=self.folder, layout=vq_layout, **where)

    @torch.no_grad()
    def encode(self, image_BCHW: Tensor) -> Tensor:
        """Encode (B, 3, H, W) float in [0, 1] to (B, C, H / stride, W / stride) fp32, in units of `scale_factor`."""
        return self.module.encode(image_BCHW.float()).latents / self.scale_factor

    @torch.no_grad()
    def decode(self, latent_BCHW: Tensor) -> Tensor:
        """Decode (B, C, H, W) to (B, 3, stride H, stride W) fp32, not clamped."""
        return self.module.decode(latent_BCHW.float() * self.scale_factor).sample


def plain_vqgan(arguments: Mapping[str, Any], state: Mapping[str, Tensor] | None) -> Any:
    """Return diffusers' `PaellaVQModel` around `state`, sharing its memory; None = on the meta device."""
    from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel  # only Stage A's

    return module_around(lambda: PaellaVQModel(**arguments), state)
