"""Samples that a run leaves out from some step on: others stand in for them, and nothing else moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cascade_train.batch import Batch
from cascade_train.data.loading.feed import Feed
from tests.unit.data import tars
from tests.unit.data.dataset_contract import content, loading
from tests.unit.data.feeding import feeding, streamed, urls
from tests.unit.data.test_shapes import shapes


def keys_of(feed: Feed, steps: int) -> list[list[str]]:
    return [[key for batch in next(feed) for key in batch.keys] for _ in range(steps)]


def moved(before: list[list[str]], after: list[list[str]]) -> dict[str, str]:
    """Return what stands in for what."""
    pairs = zip((key for step in before for key in step), (key for step in after for key in step), strict=True)
    return {one: other for one, other in pairs if one != other}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_next_sample_stands_in_and_all_others_keep_their_places(num_workers: int) -> None:
    with loading(shapes(num_workers=num_workers)) as loader:
        expected = keys_of(loader, 10)
        loader.seek(2)
        state = json.loads(json.dumps(loader.state_dict()))
    doomed = expected[3][:2]
    with loading(shapes(num_workers=num_workers, exclude=doomed)) as resumed:
        resumed.load_state_dict(state)
        assert moved(expected[2:], keys_of(resumed, 8)).keys() == set(doomed)
        assert not resumed.skipped


def test_the_stand_in_is_the_next_that_is_neither_excluded_nor_unreadable(tmp_path: Path) -> None:
    tar = tars.write(tmp_path / "a.tar", tars.samples(range(6), damaged=[3]))
    with loading(tars.webdataset(tar, max_unreadable_share=0.5, exclude=["a.tar:0002", "a.tar:0004"])) as loader:
        found = {key[-1] for step in keys_of(loader, 6) for key in step}
        assert found == {"0", "1", "5"}
        assert [each.name for each in loader.skipped] == ["a.tar:0003"]


def test_ranks_agree_on_stand_ins() -> None:
    def steps(rank: int, ranks: int) -> list[list[Batch]]:
        doomed = [f"shapes-seed0:{row:07d}" for row in range(0, 37, 3)]
        with loading(shapes(exclude=doomed), rank=rank, ranks=ranks) as loader:
            return [next(loader) for _ in range(5)]

    halves = zip(steps(0, 2), steps(1, 2), strict=True)
    assert [content(one + other) for one, other in halves] == [content(step) for step in steps(0, 1)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_streams_one_of_the_block_stands_in(tmp_path: Path, num_workers: int) -> None:
    given = urls(tmp_path)
    with feeding(streamed(given, num_workers=num_workers)) as feed:
        expected = keys_of(feed, 5)
    doomed = expected[4][1]
    with feeding(streamed(given, num_workers=num_workers)) as feed:
        before = keys_of(feed, 2)
        state = json.loads(json.dumps(feed.state_dict()))
    with feeding(streamed(given, num_workers=num_workers, exclude=[doomed])) as resumed:
        resumed.load_state_dict(state)
        assert moved(expected, before + keys_of(resumed, 3)).keys() == {doomed}
        assert not resumed.skipped
