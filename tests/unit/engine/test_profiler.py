"""The profiler's window."""

import json

import pytest
import torch

from cascade_train.engine.profiler import Profiler
from cascade_train.errors import RunError


def train(profiler, first, last):
    for step in range(first, last + 1):
        with torch.profiler.record_function(f"step_{step}"):
            torch.ones(4) @ torch.ones(4)
        profiler.step(step)


def steps_in(path):
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    return sorted(int(name[5:]) for name in names if name.startswith("step_"))


def test_the_trace_holds_the_steps_of_the_window(world, tmp_path):
    train(Profiler(directory=tmp_path, start_step=3, steps=2), 1, 8)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["steps_3_to_4_rank_0.json"]
    assert steps_in(tmp_path / "profile" / "steps_3_to_4_rank_0.json") == [3, 4]


def test_a_resumed_run_profiles_what_is_left_of_the_window(world, tmp_path):
    train(Profiler(directory=tmp_path, start_step=3, steps=4), 4, 8)
    assert steps_in(tmp_path / "profile" / "steps_5_to_6_rank_0.json") == [5, 6]


def test_a_window_that_has_passed_is_left_alone(world, tmp_path):
    train(Profiler(directory=tmp_path, start_step=3, steps=2), 6, 8)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_inside_the_window_keeps_what_it_has(world, tmp_path):
    profiler = Profiler(directory=tmp_path, start_step=2, steps=100)
    train(profiler, 1, 3)
    profiler.close()
    profiler.close()
    assert steps_in(tmp_path / "profile" / "steps_2_to_3_rank_0.json") == [2, 3]


def test_off_measures_nothing(world, tmp_path):
    train(Profiler(directory=tmp_path, start_step=0, steps=None), 1, 5)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_is_a_run_error(world, tmp_path):
    (tmp_path / "profile").write_text("in the way")
    with pytest.raises(RunError, match=r"the profile .* could not be written"):
        train(Profiler(directory=tmp_path, start_step=2, steps=1), 1, 3)
