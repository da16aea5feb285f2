"""The original's schedules that no option of conf/ names, for its reference cases.

Shape legend: B batch, N buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cascade_train.diffusion.bucket import Bucketed
from cascade_train.diffusion.schedule import Schedule, _BoundedSchedule, _VarianceSchedule
from cascade_train.options import Share, check_within


@dataclass(frozen=True, kw_only=True)
class AdaptiveTrainSchedule(Bucketed, Schedule):
    """Noise levels drawn where the loss is high: buckets of logSNR of equal width, probability by running loss.

    As a function of t it is the quantile function of that distribution (t = 1 is the lowest logSNR).

    Attributes:
        min_probs: added to every bucket's loss before normalising, >= 0.
        outside: bucket of a logSNR outside the range: "nearest", or "first" as in the original.
    """

    force_limits: bool = False
    beta: Share[float] = 0.99
    min_probs: float
    outside: Literal["nearest", "first"] = "nearest"

    def __post_init__(self) -> None:
        check_within("min_probs", self.min_probs, 0.0, math.inf)
        super().__post_init__()

    def _curve(self, t_B: Tensor) -> Tensor:
        low, high = self.logsnr_range
        mass_N = self.loss_on(t_B.device) + self.min_probs
        probability_N = mass_N / mass_N.sum()
        # A running sum without cumsum, which has no deterministic kernel on CUDA.
        below_N = (probability_N * torch.ones(self.buckets, self.buckets, device=t_B.device).tril()).sum(1)
        bucket_B = torch.searchsorted(below_N, 1 - t_B).clamp(max=self.buckets - 1)
        above_B = below_N[bucket_B] - (1 - t_B)
        place_B = bucket_B + 1 - (above_B / probability_N[bucket_B].clamp(min=1e-12)).clamp(0, 1)
        return low + place_B * ((high - low) / self.buckets)

    def bucket(self, logsnr_B: Tensor) -> Tensor:
        """Bucket, (B,) int64, of (B,) logSNR."""
        low, high = self.logsnr_range
        edge_N = torch.linspace(low, high, self.buckets + 1, dtype=torch.float32, device=logsnr_B.device)
        bucket_B = torch.searchsorted(edge_N, logsnr_B.contiguous(), right=True) - 1
        if self.outside == "first":
            bucket_B = torch.where(logsnr_B < high, bucket_B, 0)
        return bucket_B.clamp(0, self.buckets - 1)


class SqrtSchedule(_VarianceSchedule):
    """Square root in the signal's variance (Li et al. 2022, "Diffusion-LM", appendix A)."""

    def _variance(self, t_B: Tensor) -> Tensor:
        return 1 - (t_B + self.s).sqrt()


class CosineLogSNRSchedule(_BoundedSchedule):
    """Cosine between two bounds of logSNR (Hoogeboom et al. 2023, eq. 1 with bounds; gdf's second cosine)."""

    def _curve(self, t_B: Tensor) -> Tensor:
        low, high = self.logsnr_range
        start, end = math.atan(math.exp(-0.5 * high)), math.atan(math.exp(-0.5 * low))
        return -2 * torch.tan(start + t_B * (end - start)).log()


class LinearSchedule(_BoundedSchedule):
    """A straight line in logSNR."""

    def _curve(self, t_B: Tensor) -> Tensor:
        low, high = self.logsnr_range
        return t_B * (low - high) + high


@dataclass(frozen=True, kw_only=True)
class InterpolatedSchedule(Schedule):
    """Two schedules mixed by time: the first at t = 1, the second at t = 0 (Hoogeboom et al. 2023, eq. 7).

    Attributes:
        first: the schedule towards noise.
        second: the schedule towards data.
        shifts: a shift for each of the two.
    """

    first: Schedule
    second: Schedule
    shifts: list[float]

    def _curve(self, t_B: Tensor) -> Tensor:
        t_B = t_B.clamp(1e-7, 1 - 1e-7)
        first_B, second_B = self.first(t_B, shift=self.shifts[0]), self.second(t_B, shift=self.shifts[1])
        return first_B * t_B + second_B * (1 - t_B)
