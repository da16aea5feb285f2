"""Pictures without detail, for super resolution: as pixels, and as Stage C's latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlFilter, ControlMap, Encode

LATENT_CHANNELS = 16


@dataclass(kw_only=True, eq=False)
class SuperResolutionFilter(ControlFilter):
    """The picture made coarse: nearest pixels of a smaller copy, (B, 3, H, W).

    Stable Cascade, modules/controlnet.py, `SRFilter`; there the result is smaller than a picture whose sides are no
    multiples of 1 / scale_factor.
    """

    channels = 3

    scale_factor: float

    def __post_init__(self) -> None:
        if not 0.0 < self.scale_factor <= 1.0:
            raise ValueError(f"scale_factor={self.scale_factor}: takes detail away, give a number above 0, at most 1")

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Map of pictures alone."""
        return lambda image_BCHW, maps: coarsen(image_BCHW.detach(), self.scale_factor)


class LatentSuperResolutionFilter(SuperResolutionFilter):
    """Latents of the smaller copy, by the stage's own semantic compressor: (B, 16, h, w).

    Stable Cascade, modules/controlnet.py, `SREffnetFilter`, which loads a second copy of the compressor.
    """

    channels = LATENT_CHANNELS

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Map by `encode`; each latent is repeated to its share of the picture."""

        @torch.no_grad()
        def latents(image_BCHW: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
            latent_BCHW = self._encoded(encode, shrink(image_BCHW, self.scale_factor))
            size = [round(side / self.scale_factor) for side in latent_BCHW.shape[-2:]]
            return F.interpolate(latent_BCHW, size=size, mode="nearest")

        return latents

    def _encoded(self, encode: Encode, small_BCHW: Tensor) -> Tensor:
        try:
            latent_BCHW = encode(small_BCHW)
        except ValueError as error:
            raise ConfigError(
                f"task.filter.scale_factor={self.scale_factor}: the stage cannot encode the smaller copy ({error});"
                " choose another scale_factor or model.image_size"
            ) from error
        if latent_BCHW.shape[1] != self.channels:
            raise ConfigError(
                f"task.filter: {type(self).__name__} is for latents of {self.channels} channels, this stage's have"
                f" {latent_BCHW.shape[1]}; use it with a model of Stage C"
            )
        return latent_BCHW

    def preview(self, control_BCHW: Tensor, image_BCHW: Tensor | None = None) -> Tensor:
        """Coarse pictures where they are known, else the colours of their latents."""
        if image_BCHW is None:
            return super().preview(control_BCHW)
        return coarsen(image_BCHW, self.scale_factor)


def shrink(image_BCHW: Tensor, scale_factor: float) -> Tensor:
    """Nearest pixels (B, C, h, w) of a smaller copy; at least one."""
    size = [max(1, int(side * scale_factor)) for side in image_BCHW.shape[-2:]]
    return F.interpolate(image_BCHW, size=size, mode="nearest")


def coarsen(image_BCHW: Tensor, scale_factor: float) -> Tensor:
    """Pictures (B, C, H, W) of their own size with the detail of a smaller copy."""
    return F.interpolate(shrink(image_BCHW, scale_factor), size=image_BCHW.shape[-2:], mode="nearest")
