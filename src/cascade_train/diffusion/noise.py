"""The noise that is added to latents, drawn one sample at a time.

Shape legend: B batch, C channels, H W latent size.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from cascade_train.errors import ConfigError
from cascade_train.options import Share, check_fields, check_within

Grid = tuple[int, int, int]
"""Level, height and width of one layer of pyramid noise."""


class Noise(abc.ABC):
    """A distribution of noise, of about unit variance."""

    @abc.abstractmethod
    def draw(self, generators: Sequence[torch.Generator], shape: tuple[int, int, int]) -> Tensor:
        """Draw (B, C, H, W) fp32 on the host, sample i from generator i alone; `shape` is (C, H, W)."""


class PlainNoise(Noise):
    """Independent standard normals."""

    def draw(self, generators: Sequence[torch.Generator], shape: tuple[int, int, int]) -> Tensor:
        """See `Noise.draw`."""
        return torch.stack([torch.randn(*shape, generator=generator) for generator in generators])


@dataclass(kw_only=True, eq=False)
class PyramidNoise(Noise):
    """Standard normals plus normals on ever coarser grids, scaled back to unit variance.

    (noise + sum_i discount^i up(normal of H / 2^i x W / 2^i)) / sqrt(1 + sum_i discount^2i), over the levels i >= 1
    whose shorter side lies in `side_range`, up to the first whose shorter side is 1 (Stable Cascade, train/train_b).
    Unit variance is exact for nearest-neighbour interpolation.

    Args:
        levels: levels in all, the finest included.
        discount: share of a level's amplitude that the next coarser one has, in [0, 1].
        side_range: smallest and largest side of a coarse grid that takes part; null = every one.
        interpolation: how a coarse grid is enlarged.
        square_grids: make coarse grids as wide as they are high, whatever the latent's shape, as in the original.
    """

    levels: int
    discount: Share[float]
    side_range: list[int] | None
    interpolation: Literal["nearest", "bilinear"]
    square_grids: bool

    def __post_init__(self) -> None:
        check_within("levels", self.levels, 1, 32)
        check_fields(self)
        if self.side_range is not None and not (
            len(self.side_range) == 2 and 1 <= self.side_range[0] <= self.side_range[1]
        ):
            raise ConfigError(f"side_range={self.side_range}: give the smallest and the largest side, as in [1, 16]")

    def draw(self, generators: Sequence[torch.Generator], shape: tuple[int, int, int]) -> Tensor:
        """See `Noise.draw`."""
        channels, *size = shape
        sizes = [tuple(size), *((height, width) for _, height, width in self.grids(*size))]
        drawn = [[torch.randn(channels, *size, generator=generator) for size in sizes] for generator in generators]
        noise, *coarse = (torch.stack(layer) for layer in zip(*drawn, strict=True))
        return self.mix(noise, coarse)

    def grids(self, height: int, width: int) -> list[Grid]:
        """Coarse grids of a latent of this size, finest first."""
        grids: list[Grid] = []
        for level in range(1, self.levels):
            rows, columns = (max(1, side >> level) for side in (height, height if self.square_grids else width))
            side = min(rows, columns)
            if self.side_range is None or self.side_range[0] <= side <= self.side_range[1]:
                grids.append((level, rows, columns))
            if side == 1:
                break
        return grids

    def mix(self, noise_BCHW: Tensor, coarse: Sequence[Tensor]) -> Tensor:
        """Add normals (B, C, h, w) on the grids of `grids`, in their order, to (B, C, H, W); unit variance."""
        total, variance = noise_BCHW, 1.0
        aligned = {"align_corners": False} if self.interpolation == "bilinear" else {}
        for (level, _, _), layer in zip(self.grids(*noise_BCHW.shape[-2:]), coarse, strict=True):
            share = self.discount**level
            enlarged = functional.interpolate(layer, noise_BCHW.shape[-2:], mode=self.interpolation, **aligned)
            total, variance = total + share * enlarged, variance + share**2
        return total / math.sqrt(variance)
