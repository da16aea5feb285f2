from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest

from cascade_train.data.loading import patience as patience_module
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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_long_wait_says_where_samples_went(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_workers: int
) -> None:
    monkeypatch.setattr(patience_module, "PATIENCE_SECONDS", 0.2)
    slow(monkeypatch, 0.35)
    before = threading.active_count()
    with (
        caplog.at_level(logging.WARNING),
        loading(shapes(num_workers=num_workers), rows=np.arange(30), global_batch_size=2) as loader,
    ):
        assert len(next(loader)[0]) == 2
        assert threading.active_count() <= before + num_workers  # the queue's own
    found = [record.getMessage() for record in caplog.records if record.name == patience_module.__name__]
    assert len(found) >= 2
    assert found[0].startswith("No batch for 0.2 s. Of 37 samples")
    assert found[1].startswith("No batch for 0.4 s. ")


def test_a_wait_beyond_the_limit_stops_and_says_where_samples_went(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 60.0)
    with (
        loading(shapes(num_workers=1, max_wait_seconds=0.5), rows=np.arange(30)) as loader,
        pytest.raises(RunError, match=rf"^no batch for 0.5 s \(data.max_wait_seconds\). {WHERE}"),
    ):
        next(loader)


def test_a_fast_feed_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), loading(shapes()) as loader:
        next(loader)
    assert caplog.text == ""
