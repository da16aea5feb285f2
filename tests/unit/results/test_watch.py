"""How long a watch waits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cascade_train.distributed.process_group import World
from cascade_train.errors import ConfigError
from cascade_train.results.evaluation import watch as watching
from cascade_train.results.evaluation.watch import next_checkpoint, wait_for_run, watch


@pytest.mark.parametrize("hours", [0.005, 0.5])
def test_a_watch_ends_on_time_without_a_new_checkpoint(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(watching, "next_checkpoint", partial(next_checkpoint, sleep=slept.append))
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: sum(slept)))
    watched: Any = SimpleNamespace(run=tmp_path, model=None, decoder=None)
    judge: Any = SimpleNamespace(digest=lambda *_: "the same way")
    assert watch(watched, judge, world, max_wait_hours=hours) == 0
    assert sum(slept) == pytest.approx(3600 * hours)


def test_a_watch_that_is_queued_early_waits_until_its_run_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, slept = tmp_path / "runs" / "long", list[float]()

    def begin(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            run.mkdir(parents=True)

    wait_for_run(run, max_wait_hours=12.0, sleep=begin)
    assert slept == [10.0] * 3
    assert caplog.messages == [f"watch={run}: no such folder yet; waits until a run begins in {run}."]
    wait_for_run(run, max_wait_hours=12.0, sleep=slept.append)
    assert len(slept) == 3, "it is there"
    with pytest.raises(ConfigError, match="no run has begun there in max_wait_hours=0.01. Name its folder"):
        wait_for_run(tmp_path / "none", max_wait_hours=0.01, sleep=slept.append)
    assert sum(slept[3:]) == pytest.approx(36, abs=10)
