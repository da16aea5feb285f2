"""How long a watch waits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cascade_train.distributed.process_group import World
from cascade_train.errors import ConfigError
from cascade_train.results.evaluation import watch as watching
from cascade_train.results.evaluation.watch import wait_for_run, watch


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a watch has slept, by which its clock goes."""
    pauses: list[float] = []
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    return pauses


def test_a_watch_ends_on_time_without_a_new_checkpoint(world: World, tmp_path: Path, slept: list[float]) -> None:
    stages: Any = SimpleNamespace(run=tmp_path)
    assert watch(stages, None, world, max_wait_hours=0.5) == 0
    assert sum(slept) == pytest.approx(1800, abs=10)


def test_a_watch_that_is_queued_early_waits_until_its_run_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "long"

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            run.mkdir(parents=True)

    monkeypatch.setattr(watching.time, "sleep", sleep)
    wait_for_run(run, max_wait_hours=12.0)
    assert slept == [10.0] * 3
    assert caplog.messages == [f"watch={run}: no such folder yet; waits until a run begins in {run}."]
    wait_for_run(run, max_wait_hours=12.0)
    assert len(slept) == 3, "it is there"
    with pytest.raises(ConfigError, match="no run has begun there in max_wait_hours=0.01. Name its folder"):
        wait_for_run(tmp_path / "none", max_wait_hours=0.01)
    assert sum(slept[3:]) == pytest.approx(36, abs=10)
