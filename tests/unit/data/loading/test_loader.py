from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cascade_train.batch import Batch
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.data.shapes import Shapes
from cascade_train.errors import ConfigError, RunError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import content, loading
from tests.unit.data.test_shapes import shapes


def broken_rows(monkeypatch: pytest.MonkeyPatch, errors: dict[int, Exception]) -> None:
    """Make reading these rows of shapes fail."""
    read = Shapes.read

    def read_or_fail(self: Shapes, row: int) -> RawSample:
        if row in errors:
            raise errors[row]
        return read(self, row)

    monkeypatch.setattr(Shapes, "read", read_or_fail)


def flat(step: list[Batch], name: str) -> list[Any]:
    return [value for micro in step for value in getattr(micro, name)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(5, "Input/output error"), "OSError: .* Input/output error"),
        (KeyError("image"), "KeyError: 'image'"),
        (RunError("the store is gone"), "the store is gone"),
    ],
)
def test_a_failure_names_the_sample_and_the_cause(monkeypatch, num_workers, error, text):
    broken_rows(monkeypatch, dict.fromkeys(range(37), error))
    with (
        loading(shapes(num_workers=num_workers)) as loader,
        pytest.raises(RunError, match=rf"^sample shapes-seed0:00000\d\d: test_loader.py, line .*: {text}") as caught,
    ):
        next(loader)
    assert "read_or_fail" in caught.value.__notes__[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_next_readable_sample_stands_in(tmp_path: Path, num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(60), damaged=[8, 9]))
    source = tars.webdataset(path, num_workers=num_workers)
    skipped, rows = [], []
    with caplog.at_level(logging.WARNING), loading(source, rows=np.array([*range(10), *range(12, 60)])) as loader:
        for _ in range(15):
            step = next(loader)
            skipped += flat(step, "skipped")
            rows += [row for micro in step for row in micro.index_B.tolist()]
        assert sorted(each.name for each in loader.skipped) == ["a.tar:0008", "a.tar:0009"]
    assert {8, 9} & set(rows) == set()
    assert rows.count(12) >= 3 * 2  # itself, and for 8 and for 9, in each of two epochs
    assert len(skipped) >= 6
    assert caplog.text.count("another stands in: a.tar:0009 (OSError") == 1


def test_draws_of_a_stand_in_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with loading(shapes()) as loader:
        before = next(loader)
    first = int(before[0].index_B[0])
    broken_rows(monkeypatch, {first: UnreadableSampleError("no picture")})
    with loading(shapes()) as loader:
        after = next(loader)
    assert after[0].index_B[0] == (first + 1) % 37
    assert content(after[1:]) == content(before[1:])


def test_a_killed_worker_is_explained_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before, main = set(children()), os.getpid()

    def die(self: Shapes, row: int) -> RawSample:
        assert os.getpid() != main
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    monkeypatch.setattr(Shapes, "read", die)
    with loading(shapes(num_workers=1)) as loader, pytest.raises(RunError, match="ended .* lower data.num_workers"):
        next(loader)
    assert_ends(before)


def test_a_worker_that_dies_between_two_batches_is_told_at_the_next_wait_alone() -> None:
    before = set(children())
    with loading(shapes(num_workers=2)) as loader:
        next(loader)
        os.kill(min(set(children()) - before), signal.SIGKILL)
        time.sleep(0.5)  # as if in logging, which swallows whatever is raised in it
        with pytest.raises(RunError, match="A data worker process ended unexpectedly .* is killed by signal"):
            next(loader)
    assert_ends(before)


def children() -> list[int]:
    """Return the processes of this one that still run."""
    own, found = os.getpid(), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == own and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def assert_ends(before: set[int]) -> None:
    deadline = time.monotonic() + 60
    while set(children()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(children()) <= before


def test_a_random_crop_is_drawn_anew_each_epoch(tmp_path: Path) -> None:
    path = tars.write(tmp_path / "a.tar", [("a.png", tars.picture(64, 16)), ("a.txt", b"wide")])
    images = {}
    for crop in ("random", "center"):
        with loading(tars.webdataset(path, crop=crop), micro_batch_size=8) as loader:
            images[crop] = next(loader)[0].image_BCHW
    assert len(images["random"].unique(dim=0)) == 8
    assert len(images["center"].unique(dim=0)) == 1


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ({"ranks": 3}, "global_batch_size=8 is not a multiple of 3 ranks x .*micro_batch_size=2: 6 or 12 would fit"),
        ({"ranks": 8}, "global_batch_size=8 is not a multiple of 8 ranks x .*micro_batch_size=2: 16 would fit"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int], fits: str) -> None:
    with pytest.raises(ConfigError, match=fits), loading(shapes(), **sizes):
        pass
