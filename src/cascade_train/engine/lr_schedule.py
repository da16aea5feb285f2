"""Learning-rate schedules as pure functions of the optimizer step; nothing here has state."""

from __future__ import annotations

import abc
import math


class LrSchedule(abc.ABC):
    """Factor on the learning rate, as a function of the optimizer step alone."""

    @abc.abstractmethod
    def factor(self, step: int, max_steps: int) -> float:
        """Return the factor in [0, 1] for optimizer step `step`, counted from 1."""


def _warmup_factor(step: int, warmup_steps: int) -> float:
    return 1.0 if warmup_steps == 0 else min(step / warmup_steps, 1.0)


class ConstantSchedule(LrSchedule):
    """Linear warmup, then constant.

    Args:
        warmup_steps: optimizer steps until the full learning rate; 0 = from the first.
        from_zero: true = one step later, so that the first step has a learning rate of 0, as in the original.
    """

    def __init__(self, *, warmup_steps: int, from_zero: bool = False) -> None:
        self.warmup_steps = _not_negative(warmup_steps)
        self.from_zero = from_zero

    def factor(self, step: int, max_steps: int) -> float:
        """Return the warmup factor; `max_steps` does not matter."""
        return _warmup_factor(step - int(self.from_zero), self.warmup_steps)


class CosineSchedule(LrSchedule):
    """Linear warmup, then half a cosine down to `min_factor` at the last step."""

    def __init__(self, *, warmup_steps: int, min_factor: float) -> None:
        if not 0.0 <= min_factor <= 1.0:
            raise ValueError(f"lr_scheduler.min_factor={min_factor} must lie in [0, 1].")
        self.warmup_steps = _not_negative(warmup_steps)
        self.min_factor = min_factor

    def factor(self, step: int, max_steps: int) -> float:
        """Return the factor at `step` of a run of `max_steps`."""
        if step <= self.warmup_steps or max_steps <= self.warmup_steps:
            return _warmup_factor(step, self.warmup_steps)
        progress = min((step - self.warmup_steps) / (max_steps - self.warmup_steps), 1.0)
        return self.min_factor + (1.0 - self.min_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _not_negative(warmup_steps: int) -> int:
    if warmup_steps < 0:
        raise ValueError(f"lr_scheduler.warmup_steps={warmup_steps} must be 0 or more.")
    return warmup_steps
