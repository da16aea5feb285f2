"""Learning-rate schedules as pure functions of the optimizer step."""

from __future__ import annotations

import abc
import math
from typing import ClassVar


class LrSchedule(abc.ABC):
    """Factor on the learning rate, as a function of the optimizer step alone.

    Attributes:
        decays: whether it lowers the learning rate after a warmup.
    """

    decays: ClassVar[bool] = True

    @abc.abstractmethod
    def factor(self, step: int, max_steps: int) -> float:
        """Factor in [0, 1] for optimizer step `step`, counted from 1."""


def _warmup_factor(step: int, warmup_steps: int) -> float:
    return 1.0 if warmup_steps == 0 else min(step / warmup_steps, 1.0)


class ConstantSchedule(LrSchedule):
    """Linear warmup, then constant.

    Args:
        warmup_steps: optimizer steps until the full learning rate; 0 = from the first.
        from_zero: true = one step later, so that the first step has a learning rate of 0, as in the original.
    """

    decays = False

    def __init__(self, *, warmup_steps: int, from_zero: bool = False) -> None:
        self.warmup_steps = _positive("warmup_steps", warmup_steps, least=0)
        self.from_zero = from_zero

    def factor(self, step: int, max_steps: int) -> float:
        """Warmup factor; `max_steps` does not matter."""
        return _warmup_factor(step - int(self.from_zero), self.warmup_steps)


class _Decay(LrSchedule):
    """Linear warmup, then from 1 down to `min_factor`, which the last step has.

    Args:
        warmup_steps: optimizer steps until the full learning rate; 0 = from the first.
        min_factor: factor at `train.max_steps` and beyond, in [0, 1].
    """

    def __init__(self, *, warmup_steps: int, min_factor: float) -> None:
        if not 0.0 <= min_factor <= 1.0:
            raise ValueError(f"lr_scheduler.min_factor={min_factor} must lie in [0, 1].")
        self.warmup_steps = _positive("warmup_steps", warmup_steps, least=0)
        self.min_factor = min_factor

    def factor(self, step: int, max_steps: int) -> float:
        """Factor at `step` of a run of `max_steps`."""
        if step <= self.warmup_steps or max_steps <= self.warmup_steps:
            return _warmup_factor(step, self.warmup_steps)
        remaining = self._remaining(min(step, max_steps) - self.warmup_steps, max_steps - self.warmup_steps)
        return self.min_factor + (1.0 - self.min_factor) * remaining

    @abc.abstractmethod
    def _remaining(self, step: int, steps: int) -> float:
        """Share, in [0, 1], that is left of 1 - `min_factor` after `step` of the `steps` of the decay."""


class CosineDecaySchedule(_Decay):
    """Linear warmup, then half a cosine down to `min_factor` at the last step (Loshchilov and Hutter 2017, eq. 5).

    Args:
        cycles: half cosines; each begins at the full learning rate again (a warm restart).
    """

    def __init__(self, *, warmup_steps: int, min_factor: float, cycles: int = 1) -> None:
        super().__init__(warmup_steps=warmup_steps, min_factor=min_factor)
        self.cycles = _positive("cycles", cycles)

    def _remaining(self, step: int, steps: int) -> float:
        done = 1.0 if step == steps else step * self.cycles % steps / steps
        return 0.5 * (1.0 + math.cos(math.pi * done))


class PolynomialSchedule(_Decay):
    """Linear warmup, then (1 - progress) ** power down to `min_factor` at the last step; power 1 is linear.

    Args:
        power: above 0.
    """

    def __init__(self, *, warmup_steps: int, min_factor: float, power: float) -> None:
        super().__init__(warmup_steps=warmup_steps, min_factor=min_factor)
        if power <= 0.0:
            raise ValueError(f"lr_scheduler.power={power} must be above 0; 1 is linear.")
        self.power = power

    def _remaining(self, step: int, steps: int) -> float:
        return float((1.0 - step / steps) ** self.power)


class WarmupStableDecaySchedule(_Decay):
    """Linear warmup, constant, then linear down to `min_factor` over the last steps (WSD, Hu et al. 2024).

    Args:
        decay_steps: last optimizer steps, over which it falls.
    """

    def __init__(self, *, warmup_steps: int, min_factor: float, decay_steps: int) -> None:
        super().__init__(warmup_steps=warmup_steps, min_factor=min_factor)
        self.decay_steps = _positive("decay_steps", decay_steps)

    def _remaining(self, step: int, steps: int) -> float:
        return min((steps - step) / self.decay_steps, 1.0)


def _positive(name: str, value: int, least: int = 1) -> int:
    if value < least:
        raise ValueError(f"lr_scheduler.{name}={value} must be {least} or more.")
    return value
