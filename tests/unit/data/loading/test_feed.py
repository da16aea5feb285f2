"""What feeds share: waiting for workers, and how many unreadable samples stop a run, with which advice."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.utils.data

from cascade_train.batch import Unreadable
from cascade_train.data.loading.feed import SkippedCount
from cascade_train.data.sample import RawSample
from cascade_train.data.shapes import Shapes
from cascade_train.errors import RunError
from tests.unit.data.dataset_contract import loading
from tests.unit.data.test_shapes import shapes

WHERE = (
    r"Of 37 samples in the index 7 are left out \(filtered or held out\) and 0 were unreadable here; 0 of earlier"
    r" epochs wait until their shape fills a batch. 0 global batches were handed out; the next is of \d+ x \d+ px,"
    r" its first sample is shapes-seed0:00000\d\d. If its store is slow"
)


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    read = Shapes.read

    def read_slowly(self: Shapes, row: int) -> RawSample:
        time.sleep(seconds)
        return read(self, row)

    monkeypatch.setattr(Shapes, "read", read_slowly)


def test_a_wait_beyond_the_limit_stops_and_says_where_samples_went(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 60.0)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)  # how long it is waited for
    with (
        loading(shapes(num_workers=1, max_wait_seconds=0.5), rows=np.arange(30)) as loader,
        pytest.raises(RunError, match=rf"^no batch for 0.5 s \(data.max_wait_seconds\). {WHERE}"),
    ):
        next(loader)


class Step(SimpleNamespace):
    """What is counted of a batch."""

    def __len__(self) -> int:
        return int(self.samples)


def step(samples: int, *names: str, reason: str = "cut") -> Any:
    return Step(samples=samples, skipped=tuple(Unreadable(name, reason) for name in names))


def test_a_few_of_many_do_not_stop_a_run_however_small_the_share() -> None:
    skipped = SkippedCount(64, 0.01)
    skipped.add(step(64, "a", "b", "c"))
    with pytest.raises(RunError, match="4 of 64 samples .* more than data.max_unreadable_share=0.01") as told:
        skipped.add(step(64, "d"))
    advised = re.search(r"data.max_unreadable_share=([0-9.]+)\. With that, this run continues", str(told.value))
    assert advised is not None
    SkippedCount(64, float(advised[1])).add(step(64, *"abcd"))
