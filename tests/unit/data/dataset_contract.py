"""What every source of samples must keep, through the loader. A test class per source inherits from this."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from cascade_train.batch import Batch
from cascade_train.data.data_set import feed_of
from cascade_train.data.order.position import FeedRequest
from cascade_train.data.source import Source

GLOBAL_BATCH_SIZE = 8


@contextmanager
def loading(source: Source, **options: Any) -> Iterator[Any]:
    """Open a source, and yield the feed of all of it."""
    index, position = source.open(), options.pop("position", 0)
    defaults = {
        "rows": np.arange(len(index)),
        "seed": 3,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "micro_batch_size": 2,
        "rank": 0,
        "ranks": 1,
    }
    request = FeedRequest(index=index, **{**defaults, **options})
    feed = feed_of(source, request)
    feed.seek(position)
    try:
        yield feed
    finally:
        feed.close()


def content(step: list[Batch]) -> str:
    """Return a digest of everything that a step holds, micro-batch borders aside."""
    state = hashlib.sha256()
    for field in ("image_BCHW", "epoch_B", "index_B"):
        state.update(torch.cat([getattr(micro, field) for micro in step]).numpy().tobytes())
    texts = [[text for micro in step for text in getattr(micro, field)] for field in ("captions", "keys")]
    state.update(repr((texts, step[0].seed)).encode())
    return state.hexdigest()


def check_form(step: list[Batch], side: int) -> None:
    """Check the documented form of micro-batches of two square pictures, of the seed 3."""
    for micro in step:
        assert micro.image_BCHW is not None
        assert micro.image_BCHW.shape == (2, 3, side, side)
        assert micro.image_BCHW.dtype == torch.uint8
        assert micro.epoch_B.dtype == micro.index_B.dtype == torch.int64
        assert all(isinstance(text, str) and text for text in (*micro.captions, *micro.keys))
        assert (micro.seed, micro.skipped) == (3, ())


def contents(source: Source, steps: int, **options: Any) -> list[str]:
    """Return the digests of the first steps."""
    with loading(source, **options) as loader:
        return [content(next(loader)) for _ in range(steps)]


class DatasetContract:
    """Inherit, define `make_source`, and state the order that must never change unnoticed.

    Attributes:
        order_digest: of the rows and epochs of the first 20 steps; the same for any data of the same layout.
        samples: how many the source has.
    """

    order_digest: ClassVar[str]
    samples: ClassVar[int]

    @classmethod
    def make_source(cls, folder: Path, **options: Any) -> Source:
        """Return the source under test, with these options changed; its data may be kept in the folder."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("data")

    @pytest.fixture(scope="class")
    @classmethod
    def uninterrupted(cls, folder: Path) -> list[str]:
        """The digests of 12 steps, which end within the third epoch."""
        return contents(cls.make_source(folder, crop="random"), 12)

    def test_batches_have_the_documented_form(self, folder: Path) -> None:
        source = self.make_source(folder)
        with loading(source) as loader:
            step = next(loader)
        assert len(step) == 4
        check_form(step, source.image_size)

    def test_every_epoch_draws_every_sample_once(self, folder: Path) -> None:
        with loading(self.make_source(folder)) as loader:
            rows, epochs = [], []
            while len(rows) < 3 * self.samples:
                for micro in next(loader):
                    rows += micro.index_B.tolist()
                    epochs += micro.epoch_B.tolist()
        for epoch in range(3):
            drawn = [row for row, e in zip(rows, epochs, strict=True) if e == epoch]
            assert sorted(drawn) == list(range(self.samples))
        assert rows[: self.samples] != rows[self.samples : 2 * self.samples]

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_resume_at_any_position_is_exact(self, folder: Path, num_workers: int, uninterrupted: list[str]) -> None:
        source = self.make_source(folder, crop="random", num_workers=num_workers)
        with loading(source) as loader:
            states = [loader.state_dict()]
            for expected in uninterrupted:
                assert content(next(loader)) == expected
                states.append(loader.state_dict())
            for position in (5, 0, 11, 7):
                loader.load_state_dict(json.loads(json.dumps(states[position])))
                assert content(next(loader)) == uninterrupted[position]
                assert loader.state_dict() == states[position + 1]
        with loading(source, position=9) as loader:
            assert [content(step) for step, _ in zip(loader, range(3), strict=False)] == uninterrupted[9:]

    @pytest.mark.parametrize(("ranks", "micro_batch_size"), [(1, 8), (2, 2), (4, 2), (4, 1)])
    def test_ranks_and_micro_batches_leave_the_global_batch_unchanged(
        self, folder: Path, ranks: int, micro_batch_size: int, uninterrupted: list[str]
    ) -> None:
        source = pickle.loads(pickle.dumps(self.make_source(folder, crop="random")))  # as workers get it
        states = []
        steps: list[list[Batch]] = [[], [], []]
        for rank in range(ranks):
            with loading(source, rank=rank, ranks=ranks, micro_batch_size=micro_batch_size) as loader:
                for step in steps:
                    step += next(loader)
                states.append(loader.state_dict())
        assert {len(micro) for step in steps for micro in step} == {micro_batch_size}
        assert [content(step) for step in steps] == uninterrupted[:3]
        assert all(state == states[0] for state in states)

    def test_the_order_is_frozen(self, folder: Path) -> None:
        with loading(self.make_source(folder)) as loader:
            steps = [next(loader) for _ in range(20)]
        drawn = [
            (row, epoch)
            for step in steps
            for micro in step
            for row, epoch in zip(micro.index_B.tolist(), micro.epoch_B.tolist(), strict=True)
        ]
        assert hashlib.sha256(repr(drawn).encode()).hexdigest()[:16] == self.order_digest
