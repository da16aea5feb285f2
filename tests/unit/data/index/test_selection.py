from __future__ import annotations

import logging

import numpy as np
import pytest

from cascade_train.data.data_set import open_data_set
from cascade_train.data.index.rows import Index, split
from cascade_train.data.index.selection import RowSelector, Selection, selected
from cascade_train.data.loading.feed import Feed, FeedRequest, Loader
from cascade_train.data.shapes import Shapes
from cascade_train.errors import ConfigError
from tests.unit.data.test_shapes import shapes


def without(*rows: int) -> RowSelector:
    def select(index: Index) -> Selection:
        return Selection(kept=~np.isin(np.arange(len(index)), rows), reason="are not wanted")

    return select


def test_rows_that_any_selector_refuses_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    index = shapes(samples=6).open()
    with caplog.at_level(logging.INFO):
        assert np.flatnonzero(selected(index, [without(0, 1), without(1, 5), without()])).tolist() == [2, 3, 4]
    assert caplog.messages == ["Left out: 2 of 6 samples are not wanted."] * 2


def test_nothing_left_is_refused_with_the_reasons() -> None:
    index = shapes(samples=3).open()
    with pytest.raises(ConfigError, match=r"no sample is left to read: 2 of 3 samples are not wanted; 1 of 3"):
        selected(index, [without(0, 1), without(2)])


def test_training_and_held_out_samples_are_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shapes, "selectors", lambda _: [without(*range(50))])
    data = open_data_set(shapes(samples=100), share=0.2, held_out=None)
    assert data.held_out is not None
    assert sorted([*data.training.rows, *data.held_out.rows]) == list(range(50, 100))
    monkeypatch.setattr(Shapes, "selectors", lambda _: [without(*held_out)])
    held_out = split(shapes(samples=100).open(), 0.2)[1]
    with pytest.raises(ConfigError, match=r"samples that take part \d+ are left to train on and 0 held out"):
        open_data_set(shapes(samples=100), share=0.2, held_out=None)


def test_a_source_may_bring_a_feed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[FeedRequest] = []

    def own_feed(self: Shapes, request: FeedRequest) -> Feed:
        requests.append(request)
        return Loader(self, request)

    monkeypatch.setattr(Shapes, "own_feed", own_feed)
    data = open_data_set(shapes(samples=10), share=None, held_out=None)
    assert next(data.training_feed(seed=0, global_batch_size=4, micro_batch_size=2, rank=1, ranks=2))
    assert (requests[0].rank, requests[0].ranks, requests[0].rows.tolist()) == (1, 2, list(range(10)))
    data.close()
