"""Schedules are pure functions of the step."""

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from cascade_train.engine.lr_schedule import (
    ConstantSchedule,
    CosineDecaySchedule,
    LrSchedule,
    PolynomialSchedule,
    WarmupStableDecaySchedule,
)


def test_first_step_of_a_warmup_is_not_zero_and_the_last_is_one():
    schedule = ConstantSchedule(warmup_steps=4)
    assert [schedule.factor(step, 100) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_warmup_from_zero_is_the_same_one_step_later():
    schedule, later = ConstantSchedule(warmup_steps=4), ConstantSchedule(warmup_steps=4, from_zero=True)
    assert [later.factor(step, 100) for step in range(1, 8)] == [0.0, *(schedule.factor(s, 100) for s in range(1, 7))]


def test_cosine_meets_warmup_and_ends_at_its_minimum():
    schedule = CosineDecaySchedule(warmup_steps=10, min_factor=0.1)
    factors = [schedule.factor(step, 110) for step in range(1, 111)]
    assert factors[9] == 1.0
    assert factors[59] == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1)
    assert factors[9:] == sorted(factors[9:], reverse=True)
    assert schedule.factor(500, 110) == pytest.approx(0.1), "past the end"
    assert ConstantSchedule(warmup_steps=0).factor(1, 10) == 1.0


def factors(schedule: LrSchedule, steps: int) -> list[float]:
    return [schedule.factor(step, steps) for step in range(1, steps + 1)]


def reference(name: str, steps: int, warmup_steps: int = 10, **more: Any) -> list[float]:
    """Return the factors of transformers' schedule, whose steps count from 0: its first factor is that of no step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    made = get_scheduler(name, optimizer, warmup_steps, steps, scheduler_specific_kwargs=more or None)
    return [made.lr_lambdas[0](step) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "name", "more"),
    [
        (PolynomialSchedule(warmup_steps=10, min_factor=0.0, power=1.0), "linear", {}),
        (PolynomialSchedule(warmup_steps=10, min_factor=0.0, power=2.0), "polynomial", {"lr_end": 0.0, "power": 2.0}),
        (PolynomialSchedule(warmup_steps=10, min_factor=0.2, power=0.5), "polynomial", {"lr_end": 0.2, "power": 0.5}),
        (CosineDecaySchedule(warmup_steps=10, min_factor=0.0), "cosine", {}),
        (CosineDecaySchedule(warmup_steps=10, min_factor=0.0, cycles=3), "cosine_with_restarts", {"num_cycles": 3}),
        (
            WarmupStableDecaySchedule(warmup_steps=10, min_factor=0.1, decay_steps=20),
            "warmup_stable_decay",
            {"num_decay_steps": 20, "min_lr_ratio": 0.1, "decay_type": "linear"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_factors_from_the_end_of_the_warmup_on_are_those_of_transformers(schedule, name, more):
    assert factors(schedule, 100)[9:] == pytest.approx(reference(name, 100, **more)[9:], abs=1e-12)


def test_each_restart_begins_at_the_full_rate():
    made = factors(CosineDecaySchedule(warmup_steps=0, min_factor=0.1, cycles=4), 100)
    assert [made[step - 1] for step in (25, 50, 75)] == [1.0, 1.0, 1.0]
    assert made[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("schedule", "given", "message"),
    [
        (CosineDecaySchedule, {"warmup_steps": -1}, "warmup_steps=-1 must be 0 or more"),
        (CosineDecaySchedule, {"min_factor": 1.5}, r"min_factor=1.5 must lie in \[0, 1\]"),
        (CosineDecaySchedule, {"min_factor": -0.1}, r"min_factor=-0.1 must lie in \[0, 1\]"),
        (CosineDecaySchedule, {"cycles": 0}, "lr_scheduler.cycles=0 must be 1 or more"),
        (PolynomialSchedule, {"power": 0.0}, "lr_scheduler.power=0.0 must be above 0"),
        (WarmupStableDecaySchedule, {"decay_steps": 0}, "lr_scheduler.decay_steps=0 must be 1 or more"),
    ],
)
def test_options_out_of_range_are_refused(schedule, given, message):
    with pytest.raises(ValueError, match=message):
        schedule(**{"warmup_steps": 0, "min_factor": 0.0, **given})
