"""How far a prediction lies from its target, where not by the squared error: outliers weigh less.

Shape legend: B batch, C channels, H W latent size.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cascade_train.diffusion.scaling import per_sample
from cascade_train.options import check_fields, check_within


class Distance(abc.ABC):
    """The training loss of one element of a prediction."""

    @abc.abstractmethod
    def __call__(self, error_BCHW: Tensor, logsnr_B: Tensor) -> Tensor:
        """Distance, (B, C, H, W) fp32, of errors (B, C, H, W) fp32 at noise levels (B,) logSNR."""


class MSE(Distance):
    """The squared error, as without a distance."""

    def __call__(self, error_BCHW: Tensor, logsnr_B: Tensor) -> Tensor:
        """See `Distance`."""
        return error_BCHW.square()


class MAE(Distance):
    """The absolute error."""

    def __call__(self, error_BCHW: Tensor, logsnr_B: Tensor) -> Tensor:
        """See `Distance`."""
        return error_BCHW.abs()


@dataclass(frozen=True, kw_only=True)
class SmoothL1(Distance):
    """2 (sqrt(error^2 + delta^2) - delta): linear, and quadratic nearer to 0 than about delta, with slopes up to 2.

    It is `smooth_l1` of kohya's sd-scripts (library/train_util.py, conditional_loss), not torch's.

    Attributes:
        delta: where an error counts as large, in [1e-4, 1000].
        schedule: constant = delta at each noise level; snr = it grows to 1 where there is no noise, as
            (1 - delta) / (1 + sigma)^2 + delta with sigma = exp(-logSNR / 2).
    """

    delta: float
    schedule: Literal["constant", "snr"]

    def __post_init__(self) -> None:
        check_within("delta", self.delta, 1e-4, 1000.0)
        check_fields(self)

    def __call__(self, error_BCHW: Tensor, logsnr_B: Tensor) -> Tensor:
        """See `Distance`."""
        return self._linear(error_BCHW, self._delta(logsnr_B))

    def _delta(self, logsnr_B: Tensor) -> Tensor:
        """Delta of each sample, (B, 1, 1, 1) fp32."""
        if self.schedule == "constant":
            return per_sample(torch.full_like(logsnr_B, self.delta))
        return per_sample((1 - self.delta) / (1 + (-logsnr_B / 2).exp()) ** 2 + self.delta)

    @staticmethod
    def _linear(error_BCHW: Tensor, delta_B111: Tensor) -> Tensor:
        square_BCHW = error_BCHW.square()  # over a sum in place of a difference, which rounds to 0 near 0
        return 2 * square_BCHW / ((square_BCHW + delta_B111.square()).sqrt() + delta_B111)


class Huber(SmoothL1):
    """2 delta (sqrt(error^2 + delta^2) - delta): the squared error near 0 (pseudo-Huber, Khrapov et al. 2024).

    It is `huber` of kohya's sd-scripts and of SimpleTuner.
    """

    def __call__(self, error_BCHW: Tensor, logsnr_B: Tensor) -> Tensor:
        """See `Distance`."""
        delta_B111 = self._delta(logsnr_B)
        return delta_B111 * self._linear(error_BCHW, delta_B111)
