"""Noise schedules: from time t in [0, 1] (0 = data, 1 = noise) to logSNR = ln(a^2 / b^2).

Shape legend: B batch, N knots.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from cascade_train.diffusion.bucket import Adaptive
from cascade_train.errors import ConfigError
from cascade_train.options import Positive, Rising, Several, Share, check_above, check_fields, check_increasing


@dataclass(frozen=True, kw_only=True)
class Schedule(Adaptive, abc.ABC):
    """A noise schedule (Stable Cascade, gdf/schedulers).

    Attributes:
        shift: factor by which the noise scale grows at equal time, for latents with more pixels
            (Hoogeboom et al. 2023, "simple diffusion", eq. 4): logSNR - 2 ln(shift). Moves the limits too.
        force_limits: clamp logSNR to its values at t = 1 and t = 0, so that a call's own shift
            cannot leave them.
        discrete_steps: number of noise levels to round t to; None = continuous.
    """

    shift: Positive[float] = 1.0
    force_limits: bool = True
    discrete_steps: Several[int | None] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.limits is not None and not all(math.isfinite(limit) for limit in self.limits):
            raise ConfigError(
                f"{type(self).__name__}: logSNR at t=1 and t=0 is {self.limits}, which must be finite; "
                "change its options or set force_limits=false"
            )

    @abc.abstractmethod
    def _curve(self, t_B: Tensor) -> Tensor:
        """LogSNR of times in [0, 1] without shift and limits; (B,) fp32 in and out."""

    @cached_property
    def limits(self) -> tuple[float, float] | None:
        """Lowest and highest logSNR, at t = 1 and t = 0; None = unlimited."""
        if not self.force_limits:
            return None
        ends = self._curve(torch.tensor([1.0, 0.0], dtype=torch.float32, device="cpu"))
        low, high = (ends - 2 * math.log(self.shift)).tolist()
        return low, high

    def __call__(self, t_B: Tensor, *, shift: float = 1.0) -> Tensor:
        """LogSNR, (B,) fp32, at (B,) times, clamped to [0, 1]; integers are indices of discrete steps.

        The call's shift is multiplied with the schedule's; the limits stay where they are.
        """
        return self._limited(self._curve(self._time(t_B)) - 2 * math.log(shift * self.shift))

    def sample(self, u_B: Tensor, *, shift: float = 1.0) -> Tensor:
        """Training logSNR, (B,) fp32, that belongs to uniform numbers (B,) in [0, 1)."""
        return self(1 - u_B, shift=shift)

    def _time(self, t_B: Tensor) -> Tensor:
        if self.discrete_steps is None:
            return t_B.float().clamp(0, 1)
        last = self.discrete_steps - 1
        step_B = (t_B.clamp(0, 1) * last).round() if t_B.is_floating_point() else t_B
        return step_B.float() / last

    def _limited(self, logsnr_B: Tensor) -> Tensor:
        return logsnr_B if self.limits is None else logsnr_B.clamp(*self.limits)


def cosine_constants(s: float) -> tuple[Tensor, Tensor]:
    """S and cos^2(s / (1 + s) * pi / 2), both () fp32 on the host.

    Rounded to fp32 at every step, as in the original: near data one bit more or less of these moves the
    noise condition by 1e-6, which its embedding multiplies by 10000.
    """
    offset = torch.tensor(s, dtype=torch.float32, device="cpu")
    return offset, torch.cos(offset / (1 + offset) * (math.pi / 2)) ** 2


@dataclass(frozen=True, kw_only=True)
class _VarianceSchedule(Schedule):
    """A curve of the signal's variance a^2.

    Attributes:
        s: offset of the time, in [0, 1], which keeps the first steps from being too small.
        clamp_range: lowest and highest a^2, within (0, 1).
        norm_instead: map a^2 linearly into the range instead of clamping it.
    """

    s: Share[float]
    clamp_range: Rising[list[float]]
    norm_instead: bool = False

    @abc.abstractmethod
    def _variance(self, t_B: Tensor) -> Tensor:
        """a^2 of times, before its range; (B,) fp32 in and out."""

    def _curve(self, t_B: Tensor) -> Tensor:
        low, high = self.clamp_range
        var_B = self._variance(t_B)
        return _logsnr_of_variance(var_B * (high - low) + low if self.norm_instead else var_B.clamp(low, high))


class CosineSchedule(_VarianceSchedule):
    """Cosine in the signal's variance (Nichol & Dhariwal 2021, eq. 17); Stable Cascade trains with it."""

    def _variance(self, t_B: Tensor) -> Tensor:
        s, start = cosine_constants(self.s)
        return torch.cos((s + t_B) / (1 + s) * (math.pi / 2)) ** 2 / start

    def sample(self, u_B: Tensor, *, shift: float = 1.0) -> Tensor:
        """Training logSNR of uniform numbers, with t = clamp(1.001 - u, 0.001, 1)."""
        return self((1 - u_B + 0.001).clamp(0.001, 1.0), shift=shift)


@dataclass(frozen=True, kw_only=True)
class _BoundedSchedule(Schedule):
    """A curve between two bounds.

    Attributes:
        logsnr_range: lowest and highest logSNR.
    """

    logsnr_range: Rising[list[float]]


class RectifiedFlowSchedule(_BoundedSchedule):
    """Straight line from data to noise, b = t and a = 1 - t (Liu et al. 2022, eq. 1)."""

    def _curve(self, t_B: Tensor) -> Tensor:
        low, high = self.logsnr_range
        return (2 * ((1 - t_B) / t_B).log()).clamp(low, high)


@dataclass(frozen=True, kw_only=True)
class EDMSampleSchedule(Schedule):
    """Noise levels for sampling of Karras et al. 2022, eq. 5, with logSNR = -2 ln(sigma).

    Attributes:
        sigma_range: lowest and highest sigma, > 0.
        p: the paper's rho, > 0; larger spends more steps at low noise.
    """

    sigma_range: Rising[list[float]]
    p: Positive[float]

    def __post_init__(self) -> None:
        check_above("sigma_range[0]", min(self.sigma_range), 0.0)
        super().__post_init__()

    def _curve(self, t_B: Tensor) -> Tensor:
        low, high = (math.pow(sigma, 1 / self.p) for sigma in self.sigma_range)
        return -2 * self.p * ((1 - t_B) * (low - high) + high).log()


@dataclass(frozen=True, kw_only=True)
class NormalSchedule(Schedule):
    """Training noise with -logSNR / 2, which is ln(b / a), drawn from a normal distribution, without limits.

    As a function of t it is the schedule beside which it is a base.

    Attributes:
        mu: mean of -logSNR / 2: of ln(sigma), the P_mean of EDM, or of logit(t) in a flow.
        std: its standard deviation, the P_std of EDM.
    """

    mu: float
    std: Positive[float]

    def sample(self, u_B: Tensor, *, shift: float = 1.0) -> Tensor:
        """Training logSNR of uniform numbers, through the normal's quantiles."""
        normal_B: Tensor = torch.special.ndtri((1 - u_B.float()).clamp(2**-24, 1 - 2**-24))
        return -2 * (self.mu + self.std * normal_B) - 2 * math.log(shift * self.shift)


@dataclass(frozen=True, kw_only=True)
class EDMTrainSchedule(NormalSchedule, EDMSampleSchedule):
    """Log-normal training noise, ln(sigma) ~ N(mu, std^2) (Karras et al. 2022, table 1).

    As a function of t it is `EDMSampleSchedule`.
    """


@dataclass(frozen=True, kw_only=True)
class LogitNormalSchedule(NormalSchedule, RectifiedFlowSchedule):
    """Logit-normal training times of a rectified flow, logit(t) ~ N(mu, std^2) (Esser et al. 2024, eq. 19).

    As a function of t it is `RectifiedFlowSchedule`.
    """


@dataclass(frozen=True, kw_only=True)
class ScaledLinearSchedule(Schedule):
    """Betas whose square roots rise linearly (Rombach et al. 2022), and a^2 linear between those knots.

    Attributes:
        linear_range: first and last beta; sqrt(beta) grows linearly.
        total_steps: number of intervals between knots.
    """

    linear_range: Rising[list[float]]
    total_steps: Several[int]

    def _curve(self, t_B: Tensor) -> Tensor:
        var_N = scaled_linear_variances(self.linear_range, self.total_steps, t_B.device)
        place_B = t_B * self.total_steps
        knot_B = place_B.long().clamp(max=self.total_steps - 1)
        return _logsnr_of_variance(torch.lerp(var_N[knot_B], var_N[knot_B + 1], place_B - knot_B))


LOWEST_LOGSNR = -60.0
"""In place of minus infinity: the signal is 1e-13 of the noise, which no fp32 sum shows."""


@dataclass(frozen=True, kw_only=True)
class DDPMSchedule(Schedule):
    """The timesteps of Ho et al. 2020, as diffusers' `DDPMScheduler` and `DDIMScheduler` have them.

    Training draws each timestep equally often. A time t is timestep round(t * num_train_timesteps) - 1, which is
    their "trailing" spacing.

    Attributes:
        beta_schedule: linear = the betas grow linearly, scaled_linear = their square roots do (Rombach et al. 2022),
            squaredcos_cap_v2 = cosine in a^2 (Nichol & Dhariwal 2021, eq. 17), without range.
        beta_start: first beta, in (0, 1).
        beta_end: last beta, above the first.
        num_train_timesteps: number of timesteps.
        rescale_betas_zero_snr: stretch the signal scale so that the last timestep is noise alone (Lin et al. 2023,
            algorithm 1).
    """

    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"]
    beta_start: Positive[float]
    beta_end: Share[float]
    num_train_timesteps: Several[int]
    rescale_betas_zero_snr: bool = False

    def __post_init__(self) -> None:
        check_increasing("[beta_start, beta_end]", [self.beta_start, self.beta_end])
        super().__post_init__()

    def knots(self, device: torch.device) -> Tensor:
        """LogSNR of each timestep, (N,) fp32, falling."""
        options = (self.beta_schedule, self.beta_start, self.beta_end, self.num_train_timesteps)
        return _ddpm_logsnr(*options, self.rescale_betas_zero_snr, device)

    def _curve(self, t_B: Tensor) -> Tensor:
        return self.knots(t_B.device)[(t_B * self.num_train_timesteps).round().long().sub(1).clamp(min=0)]

    def sample(self, u_B: Tensor, *, shift: float = 1.0) -> Tensor:
        """Training logSNR of uniform numbers: timestep floor((1 - u) * num_train_timesteps)."""
        step_B = ((1 - u_B) * self.num_train_timesteps).long().clamp(max=self.num_train_timesteps - 1)
        return self._limited(self.knots(u_B.device)[step_B] - 2 * math.log(shift * self.shift))


@lru_cache(maxsize=32)
def _ddpm_logsnr(kind: str, start: float, end: float, steps: int, zero_snr: bool, device: torch.device) -> Tensor:
    """LogSNR of each timestep, (N,) fp32; a^2 is rounded as diffusers rounds it."""
    on_host: Any = {"dtype": torch.float32, "device": "cpu"}
    if kind == "squaredcos_cap_v2":
        bar = [math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(steps + 1)]
        beta_N = torch.tensor([min(1 - after / before, 0.999) for before, after in pairwise(bar)], **on_host)
    elif kind == "scaled_linear":
        beta_N = torch.linspace(start**0.5, end**0.5, steps, **on_host) ** 2
    else:
        beta_N = torch.linspace(start, end, steps, **on_host)
    if zero_snr:
        beta_N = _with_zero_terminal_snr(beta_N)
    var_N = (1.0 - beta_N).cumprod(0).double()
    return (var_N.log() - (-var_N).log1p()).clamp(min=LOWEST_LOGSNR).float().to(device)


def _with_zero_terminal_snr(beta_N: Tensor) -> Tensor:
    """Betas (N,) whose last signal scale is 0 and whose first is unchanged (Lin et al. 2023, algorithm 1)."""
    a_N = (1.0 - beta_N).cumprod(0).sqrt()
    var_N = ((a_N - a_N[-1]) * (a_N[0] / (a_N[0] - a_N[-1]))) ** 2
    return 1 - torch.cat([var_N[:1], var_N[1:] / var_N[:-1]])


def scaled_linear_variances(linear_range: list[float], total_steps: int, device: torch.device) -> Tensor:
    """a^2 at the knots, (total_steps + 1,) fp32, falling (gdf/schedulers)."""
    first, last = (math.sqrt(beta) for beta in linear_range)
    beta_N = torch.linspace(first, last, total_steps + 1, dtype=torch.float32, device=device) ** 2
    return (1 - beta_N).cumprod(0)


def _logsnr_of_variance(var_B: Tensor) -> Tensor:
    return (var_B / (1 - var_B)).log()
