from __future__ import annotations

import pytest

from cascade_train.data.data_set import open_data_set
from cascade_train.errors import ConfigError
from tests.unit.data.dataset_contract import content
from tests.unit.data.test_shapes import shapes

ONE_RANK = {"micro_batch_size": 4, "rank": 0, "ranks": 1}


def test_held_out_samples_are_never_trained_on() -> None:
    data = open_data_set(shapes(samples=100), share=0.2, held_out=None)
    assert data.held_out is not None
    assert sorted([*data.training.rows, *data.held_out.rows]) == list(range(100))
    feed = data.training_feed(seed=0, global_batch_size=4, **ONE_RANK)
    drawn = {row for _ in range(50) for micro in next(feed) for row in micro.index_B.tolist()}
    assert drawn == set(data.training.rows.tolist())
    data.close()


def test_the_held_out_feed_repeats_itself() -> None:
    data = open_data_set(shapes(samples=100, num_workers=1), share=0.2, held_out=None)
    feed = data.held_out_feed(seed=0, samples=10, **ONE_RANK)
    first = [content(step) for step in feed.from_start()]
    assert len(first) == feed.steps == 3
    assert [content(step) for step in feed.from_start()] == first
    weights = [float(micro.weight_B.sum()) for step in feed.from_start() for micro in step]
    assert sum(weights) == 10, "two samples fill the last batch and do not count"
    data.close()


def test_held_out_samples_may_come_from_a_source_of_their_own() -> None:
    data = open_data_set(shapes(), share=None, held_out=shapes(seed=9, samples=5))
    assert len(data.training.rows) == 37
    batch = data.shown_batch(8, seed=0)
    assert len(batch) == 5
    assert all(key.startswith("shapes-seed9:") for key in batch.keys)
    data.close()


def test_nothing_held_out_shows_training_samples_and_refuses_to_measure() -> None:
    data = open_data_set(shapes(), share=None, held_out=None)
    assert len(data.shown_batch(3, seed=0)) == 3
    with pytest.raises(ConfigError, match="0 held-out samples for 1 ranks; raise validate.share"):
        data.held_out_feed(seed=0, samples=10, **ONE_RANK)
    data.close()
