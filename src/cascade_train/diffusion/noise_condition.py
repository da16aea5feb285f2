"""The noise level as the network gets it: logSNR to a scalar, its `timestep_ratio`.

The network's embedding multiplies the scalar by 10000, so everything here stays fp32.

Shape legend: B batch, N knots.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cascade_train.diffusion.schedule import DDPMSchedule, cosine_constants, scaled_linear_variances
from cascade_train.options import Positive, Rising, Several, Share, check_fields


@dataclass(frozen=True, kw_only=True)
class NoiseCondition(abc.ABC):
    """A noise condition (Stable Cascade, gdf/noise_conditions).

    Attributes:
        shift: the condition is that of logSNR + 2 ln(shift): the inverse of a schedule's shift.
        clamp_range: lowest and highest value; None = unlimited.
        unit: what it counts: "time" in [0, 1], "timestep" of a discrete schedule, or "flow_timestep", a share of noise
            in steps; None = anything else. A stage refuses another than its network was made for.
    """

    unit: ClassVar[str | None] = None

    shift: Positive[float] = 1.0
    clamp_range: Rising[list[float] | None] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @abc.abstractmethod
    def _value(self, logsnr_B: Tensor) -> Tensor:
        """Condition without shift and clamp; (B,) fp32 in and out."""

    def __call__(self, logsnr_B: Tensor) -> Tensor:
        """Condition, (B,) fp32, of (B,) logSNR."""
        value_B = self._value(logsnr_B.float() + 2 * math.log(self.shift))
        return value_B if self.clamp_range is None else value_B.clamp(*self.clamp_range)


@dataclass(frozen=True, kw_only=True)
class CosineTimeCondition(NoiseCondition):
    """The time at which the cosine schedule has this logSNR; the input of Stable Cascade's networks.

    Attributes:
        s: the schedule's offset, in [0, 1].
        clamp_range: lowest and highest value, of a^2 as well as of the time.
    """

    unit = "time"

    s: Share[float]

    def _value(self, logsnr_B: Tensor) -> Tensor:
        low, high = (0.0, 1.0) if self.clamp_range is None else self.clamp_range
        s, start = cosine_constants(self.s)
        angle_B = (logsnr_B.sigmoid().clamp(low, high) * start).sqrt().acos()
        return (angle_B / (math.pi / 2) * (1 + s) - s).clamp(low, high)


class EDMCondition(NoiseCondition):
    """A quarter of ln(sigma), which is -logSNR / 8 (Karras et al. 2022, table 1)."""

    def _value(self, logsnr_B: Tensor) -> Tensor:
        return -logsnr_B / 8


@dataclass(frozen=True, kw_only=True)
class EDMSigmaCondition(NoiseCondition):
    """The noise level sigma itself.

    Attributes:
        sigma_data: standard deviation of the data, > 0, by which the level is multiplied.
    """

    sigma_data: Positive[float]

    def _value(self, logsnr_B: Tensor) -> Tensor:
        return (-logsnr_B / 2).exp() * self.sigma_data


class SigmoidCondition(NoiseCondition):
    """The noise's share of the variance, sigmoid(-logSNR)."""

    unit = "time"

    def _value(self, logsnr_B: Tensor) -> Tensor:
        return (-logsnr_B).sigmoid()


class LogSNRCondition(NoiseCondition):
    """The logSNR itself."""

    def _value(self, logsnr_B: Tensor) -> Tensor:
        return logsnr_B


class RectifiedFlowCondition(NoiseCondition):
    """Place on the straight line from noise (0) to data (1): the signal scale of `LerpScaling`."""

    unit = "time"

    def _value(self, logsnr_B: Tensor) -> Tensor:
        return (logsnr_B / 2).sigmoid()


@dataclass(frozen=True, kw_only=True)
class FlowTimestepCondition(NoiseCondition):
    """Place on the straight line from data (0) to noise: the noise scale of `LerpScaling`, counted in steps.

    Attributes:
        num_train_timesteps: steps of the line; 1000 for the published networks, 1 = the scale itself.
    """

    unit = "flow_timestep"

    num_train_timesteps: Positive[int]

    def _value(self, logsnr_B: Tensor) -> Tensor:
        return (-logsnr_B / 2).sigmoid() * self.num_train_timesteps


@dataclass(frozen=True, kw_only=True)
class ScaledLinearCondition(NoiseCondition):
    """The time at which a `ScaledLinearSchedule` has this logSNR.

    Attributes:
        linear_range: the schedule's first and last beta.
        total_steps: the schedule's number of intervals.
    """

    unit = "time"

    linear_range: Rising[list[float]]
    total_steps: Several[int]

    def _value(self, logsnr_B: Tensor) -> Tensor:
        rising_N = scaled_linear_variances(self.linear_range, self.total_steps, logsnr_B.device).flip(0)
        var_B = logsnr_B.sigmoid()
        upper_B = torch.searchsorted(rising_N, var_B).clamp(1, self.total_steps)
        low_B, high_B = rising_N[upper_B - 1], rising_N[upper_B]
        place_B = upper_B - (high_B - var_B) / (high_B - low_B)
        return 1 - place_B.clamp(0, self.total_steps) / self.total_steps


@dataclass(frozen=True, kw_only=True)
class DDPMTimestepCondition(NoiseCondition):
    """The timestep at which a schedule has this logSNR, in [0, num_train_timesteps - 1].

    Of the schedule's own noise levels it is the whole number; between them it is linear.

    Attributes:
        schedule: whose timesteps these are.
    """

    unit = "timestep"

    schedule: DDPMSchedule

    def _value(self, logsnr_B: Tensor) -> Tensor:
        last = self.schedule.num_train_timesteps - 1
        rising_N = self.schedule.knots(logsnr_B.device).flip(0)
        upper_B = torch.searchsorted(rising_N, logsnr_B.contiguous()).clamp(1, last)
        low_B, high_B = rising_N[upper_B - 1], rising_N[upper_B]
        return (last - upper_B + (high_B - logsnr_B) / (high_B - low_B)).clamp(0, last)


@dataclass(frozen=True, kw_only=True)
class DiscreteCondition(NoiseCondition):
    """Another condition as a whole number of steps, cut towards zero and kept as fp32.

    Attributes:
        condition: the continuous condition.
        steps: number of steps into which its range is cut.
        continuous_range: the values that become 0 and `steps`.
    """

    condition: NoiseCondition
    steps: Positive[int]
    continuous_range: Rising[list[float]]

    def _value(self, logsnr_B: Tensor) -> Tensor:
        low, high = self.continuous_range
        return ((self.condition(logsnr_B) - low) / (high - low) * self.steps).trunc()
