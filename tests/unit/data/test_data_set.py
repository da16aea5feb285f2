from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

from cascade_train.data.buckets import Buckets
from cascade_train.data.data_set import open_data_set
from cascade_train.errors import RunError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import content
from tests.unit.data.test_mixture import mixture_of
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


def mixed(folder: Path) -> Path:
    """Write 60 pictures of four shapes, three of them rare."""
    sizes = [(64, 64)] * 6 + [(120, 60), (60, 120), (128, 64), (96, 64)]
    files = [
        member
        for key in range(60)
        for member in ((f"{key:03d}.png", tars.picture(*sizes[key % 10])), (f"{key:03d}.txt", b"a gradient"))
    ]
    return tars.write(folder / "mixed.tar", files)


RATIOS = {"aspect_ratios": ["1/1", "1/2", "2/3"], "buckets": Buckets(multiple_px=8), "image_size": 64}


def test_held_out_samples_of_every_shape_are_measured_once(tmp_path: Path) -> None:
    source = tars.webdataset(mixed(tmp_path), **RATIOS)
    data = open_data_set(source, share=None, held_out=tars.webdataset(mixed(tmp_path), **RATIOS))
    for ranks in (1, 2):
        counted: Counter[int] = Counter()
        feeds = [data.held_out_feed(seed=0, samples=60, micro_batch_size=4, rank=r, ranks=ranks) for r in range(ranks)]
        for steps in zip(*(feed.from_start() for feed in feeds), strict=True):
            micros = [micro for step in steps for micro in step]
            assert len({micro.image_BCHW.shape for micro in micros}) == 1
            for micro in micros:
                rows = zip(micro.index_B.tolist(), micro.weight_B.tolist(), strict=True)
                counted.update(row for row, weight in rows if weight)
        assert counted == Counter(range(60))
    assert len(data.shown_batch(100, seed=0)) == 36
    data.close()


def test_ranks_have_one_shape_at_a_step_and_continue_on_other_ranks(tmp_path: Path) -> None:
    """2 ranks, then 1, then 3: no sample twice in an epoch, none lost, the same batches as one rank's."""
    data = open_data_set(tars.webdataset(mixed(tmp_path), **RATIOS), share=None, held_out=None)
    whole = data.training_feed(seed=0, global_batch_size=6, micro_batch_size=6, rank=0, ranks=1)
    expected = [next(whole)[0] for _ in range(30)]
    state, position = whole.state_dict(), 0
    whole.seek(0)
    state = whole.state_dict()
    for ranks, steps in ((2, 7), (1, 9), (3, 14)):
        feeds = [
            data.training_feed(seed=0, global_batch_size=6, micro_batch_size=1, rank=r, ranks=ranks)
            for r in range(ranks)
        ]
        for feed in feeds:
            feed.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            micros = [micro for feed in feeds for micro in next(feed)]
            assert torch.equal(torch.cat([micro.image_BCHW for micro in micros]), expected[position].image_BCHW)
            assert torch.cat([micro.index_B for micro in micros]).tolist() == expected[position].index_B.tolist()
            position += 1
        states = [feed.state_dict() for feed in feeds]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert len({batch.image_BCHW.shape for batch in expected}) == 4
    data.close()


def test_pictures_without_a_header_are_named_at_the_start_and_too_many_stop_it_unless_they_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [(f"bad{i}.{extension}", b"?") for i in range(12) for extension in ("jpg", "txt")]
    path = tars.write(tmp_path / "a.tar", [*tars.samples(range(5)), *bad])
    too_many = r"12 of 17 samples are unreadable, .*=0.01 allows: a.tar:bad0, .* and 2 more .* Remove .*_share=0.71\."
    with pytest.raises(RunError, match=too_many):
        open_data_set(tars.webdataset(path), share=None, held_out=None)
    mixture = mixture_of({"one": tars.webdataset(path)})
    with pytest.raises(RunError, match=too_many.replace("a.tar", "mixture:one/a.tar")):
        open_data_set(mixture, share=None, held_out=None)
    with caplog.at_level(logging.WARNING):
        assert len(
            open_data_set(tars.webdataset(path, max_unreadable_share=0.71), share=None, held_out=None).training.rows
        )
    assert "12 of 17 pictures have no header that can be read: a.tar:bad0, a.tar:bad1" in caplog.text
    caplog.clear()
    (tmp_path / "list.jsonl").write_text("".join(json.dumps({"sample": f"a.tar:bad{i}"}) + "\n" for i in range(12)))
    source = tars.webdataset(path, quarantine=str(tmp_path / "list.jsonl"))
    assert open_data_set(source, share=None, held_out=None).training.rows.tolist() == [0, 1, 2, 3, 4]
    assert "no header" not in caplog.text
