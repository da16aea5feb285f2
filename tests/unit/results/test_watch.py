"""How long a watch waits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cascade_train.distributed.process_group import World
from cascade_train.results.evaluation import watch as watching
from cascade_train.results.evaluation.watch import next_checkpoint, watch


@pytest.mark.parametrize("hours", [0.005, 0.5])
def test_a_watch_ends_on_time_without_a_new_checkpoint(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(watching, "next_checkpoint", partial(next_checkpoint, sleep=slept.append))
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: sum(slept)))
    watched: Any = SimpleNamespace(run=tmp_path, model=None, decoder=None)
    judge: Any = SimpleNamespace(way=lambda *_: "the same way")
    assert watch(watched, judge, world, max_wait_hours=hours) == 0
    assert sum(slept) == pytest.approx(3600 * hours)
