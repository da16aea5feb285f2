"""Schedules are pure functions of the step."""

import pytest

from cascade_train.engine.lr_schedule import ConstantSchedule, CosineSchedule


def test_first_step_of_a_warmup_is_not_zero_and_the_last_is_one():
    schedule = ConstantSchedule(warmup_steps=4)
    assert [schedule.factor(step, 100) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_no_warmup_starts_at_one():
    assert ConstantSchedule(warmup_steps=0).factor(1, 10) == 1.0


def test_a_warmup_from_zero_is_the_same_one_step_later():
    schedule, later = ConstantSchedule(warmup_steps=4), ConstantSchedule(warmup_steps=4, from_zero=True)
    assert [later.factor(step, 100) for step in range(1, 8)] == [0.0, *(schedule.factor(s, 100) for s in range(1, 7))]


def test_cosine_meets_warmup_and_ends_at_its_minimum():
    schedule = CosineSchedule(warmup_steps=10, min_factor=0.1)
    factors = [schedule.factor(step, 110) for step in range(1, 111)]
    assert factors[9] == 1.0
    assert factors[59] == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1)
    assert factors[9:] == sorted(factors[9:], reverse=True)


def test_cosine_stays_at_its_minimum_past_the_end():
    assert CosineSchedule(warmup_steps=0, min_factor=0.0).factor(500, 100) == pytest.approx(0.0)


def test_negative_warmup_is_refused():
    with pytest.raises(ValueError, match="warmup_steps=-1 must be 0 or more"):
        ConstantSchedule(warmup_steps=-1)


def test_minimum_outside_zero_to_one_is_refused():
    with pytest.raises(ValueError, match=r"min_factor=1.5 must lie in \[0, 1\]"):
        CosineSchedule(warmup_steps=0, min_factor=1.5)
