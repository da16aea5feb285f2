"""Distributions of the times at which latents are noised in training, in place of uniform ones.

A time t is 0 at the data and 1 at noise alone; a schedule turns it into a noise level. Shape legend: B batch.
"""

from __future__ import annotations

import abc
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cascade_train.options import Positive, check_fields, check_within

_LEAST = 2**-24


class Times(abc.ABC):
    """How times are distributed."""

    def __call__(self, u_B: Tensor) -> Tensor:
        """Map uniform numbers u = 1 - t, so that their times have this distribution; (B,) fp32 in [0, 1) in and out."""
        return (1 - self.quantile(1 - u_B.float().clamp(_LEAST, 1 - _LEAST))).clamp(0.0, 1 - _LEAST)

    @abc.abstractmethod
    def quantile(self, share_B: Tensor) -> Tensor:
        """Times below which lies a share of all, (B,) fp32 in (0, 1) in, in [0, 1] out."""


@dataclass(frozen=True, kw_only=True)
class LogitNormalTimes(Times):
    """Times with logit(t) ~ N(mean, std^2) (Esser et al. 2024, eq. 19).

    Attributes:
        mean: above 0 = more noise. What diffusers' and kohya's scripts for SD3 call logit_mean counts the other way.
        std: the smaller, the closer all times are to sigmoid(mean).
    """

    mean: float
    std: Positive[float]

    def __post_init__(self) -> None:
        check_fields(self, "times.")

    def quantile(self, share_B: Tensor) -> Tensor:
        """See `Times`."""
        normal_B: Tensor = torch.special.ndtri(share_B)
        return torch.sigmoid(self.mean + self.std * normal_B)


@dataclass(frozen=True, kw_only=True)
class ModeTimes(Times):
    """Times with a mode at 1/2 and a density above 0 everywhere (Esser et al. 2024, eq. 20).

    Attributes:
        scale: from -1 to 2 / (pi - 2); above 0 = more often near 1/2, below 0 = near the ends, 0 = uniform.
    """

    scale: float

    def __post_init__(self) -> None:
        check_within("times.scale", self.scale, -1.0, 2 / (math.pi - 2))

    def quantile(self, share_B: Tensor) -> Tensor:
        """See `Times`; the paper's u is 1 - share."""
        u_B = 1 - share_B
        return 1 - u_B - self.scale * (torch.cos(math.pi / 2 * u_B).square() - 1 + u_B)


@dataclass(frozen=True, kw_only=True)
class BetaTimes(Times):
    """Times with t ~ Beta(alpha, beta): the larger alpha beside beta, the more noise; 1 and 1 are uniform.

    Quantiles are interpolated in a table of the distribution function, made by the trapezoidal rule in fp64.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            check_within(f"times.{name}", getattr(self, name), 1.0, 100.0)

    def quantile(self, share_B: Tensor) -> Tensor:
        """See `Times`."""
        t_N, share_N = _beta_table(self.alpha, self.beta, share_B.device)
        above_B = torch.searchsorted(share_N, share_B.double()).clamp(1, len(t_N) - 1)
        low_B, high_B = share_N[above_B - 1], share_N[above_B]
        inside_B = (share_B.double() - low_B) / (high_B - low_B).clamp(min=torch.finfo(torch.float64).tiny)
        return (t_N[above_B - 1] + inside_B.clamp(0, 1) / (len(t_N) - 1)).float()


@functools.cache
def _beta_table(alpha: float, beta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Times, and the share of times below each, (N,) fp64.

    Made on the CPU: CUDA has no deterministic sum of this kind (`run.deterministic`).
    """
    t_N = torch.linspace(0, 1, 2**16 + 1, dtype=torch.float64, device="cpu")
    density_N = t_N ** (alpha - 1) * (1 - t_N) ** (beta - 1)
    share_N = torch.cat([t_N.new_zeros(1), torch.cumulative_trapezoid(density_N)])
    return t_N.to(device), (share_N / share_N[-1]).to(device)
