"""How logSNR splits into signal scale a and noise scale b: noised = a * x0 + b * noise.

Shape legend: B batch, C channels, H W latent size.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cascade_train.diffusion.schedule import Schedule
from cascade_train.options import Positive, check_fields


class Scaling(abc.ABC):
    """Signal and noise scale as functions of logSNR (Stable Cascade, gdf/scalers)."""

    def __post_init__(self) -> None:
        check_fields(self)

    @abc.abstractmethod
    def __call__(self, logsnr_B: Tensor) -> tuple[Tensor, Tensor]:
        """(a_B, b_B), each (B,) fp32 in [0, 1] (`EDMScaling`: a may be larger), of (B,) logSNR."""


class VPScaling(Scaling):
    """Variance preserving: a^2 = sigmoid(logSNR), a^2 + b^2 = 1 (Kingma et al. 2021, eq. 3-4)."""

    def __call__(self, logsnr_B: Tensor) -> tuple[Tensor, Tensor]:
        """See `Scaling`."""
        var_B = logsnr_B.float().sigmoid()
        return var_B.sqrt(), (1 - var_B).sqrt()


class LerpScaling(Scaling):
    """Straight line between data and noise: a + b = 1, (a / b)^2 = SNR (Liu et al. 2022, eq. 1)."""

    def __call__(self, logsnr_B: Tensor) -> tuple[Tensor, Tensor]:
        """See `Scaling`."""
        half_B = logsnr_B.float() / 2
        return half_B.sigmoid(), (-half_B).sigmoid()


@dataclass(frozen=True, kw_only=True)
class EDMScaling(Scaling):
    """The input of EDM's preconditioning, c_in (x0 + sigma noise) (Karras et al. 2022, table 1).

    logSNR is -2 ln(sigma); a = c_in = 1 / sqrt(sigma^2 + sigma_data^2), b = sigma a.

    Attributes:
        sigma_data: standard deviation of the latents, > 0; 1 makes this `VPScaling`.
    """

    sigma_data: Positive[float]

    def __call__(self, logsnr_B: Tensor) -> tuple[Tensor, Tensor]:
        """See `Scaling`."""
        sigma_B = (-logsnr_B.float() / 2).exp()
        a_B = 1 / (sigma_B**2 + self.sigma_data**2).sqrt()
        return a_B, sigma_B * a_B


@dataclass(frozen=True, kw_only=True)
class StretchedScaling(Scaling):
    """Another scaling, stretched linearly so that it reaches its ends (Stable Cascade, gdf stretch_limits).

    Attributes:
        scaling: the scaling to stretch.
        schedule: whose ends, at t = 1 and t = 0, become exact.
        stretch_max: reach pure noise, a = 0 and b = 1, at t = 1.
        stretch_min: reach pure data, a = 1 and b = 0, at t = 0.
        shift: shift of the schedule's ends.
    """

    scaling: Scaling
    schedule: Schedule
    stretch_max: bool = True
    stretch_min: bool = True
    shift: Positive[float] = 1.0

    @cached_property
    def ends(self) -> tuple[float, float, float, float]:
        """Lowest and highest a, lowest and highest b, as they are before the stretch."""
        t_2 = torch.tensor([1.0, 0.0], dtype=torch.float32, device="cpu")
        a_2, b_2 = self.scaling(self.schedule(t_2, shift=self.shift))
        (min_a, max_a), (max_b, min_b) = a_2.tolist(), b_2.tolist()
        min_a, max_b = (min_a, max_b) if self.stretch_max else (0.0, 1.0)
        max_a, min_b = (max_a, min_b) if self.stretch_min else (1.0, 0.0)
        return min_a, max_a, min_b, max_b

    def __call__(self, logsnr_B: Tensor) -> tuple[Tensor, Tensor]:
        """See `Scaling`."""
        min_a, max_a, min_b, max_b = self.ends
        a_B, b_B = self.scaling(logsnr_B)
        return (a_B - min_a) / (max_a - min_a), (b_B - min_b) / (max_b - min_b)


def per_sample(value_B: Tensor) -> Tensor:
    """View (B,) values as (B, 1, 1, 1), to scale (B, C, H, W) latents sample by sample."""
    return value_B[:, None, None, None]
