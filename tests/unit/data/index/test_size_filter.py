from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cascade_train.data.data_set import open_data_set
from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.data.index.size_filter import parse_size_filters, size_selection
from cascade_train.errors import ConfigError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import loading

SIZES = [(640, 480), (480, 640), (100, 400), (512, 512), (0, 0), (3000, 1000)]


def index(sizes: list[tuple[int, int]]) -> Index:
    table = np.zeros(len(sizes), dtype=ROW_FIELDS)
    table["width"], table["height"] = np.array(sizes).T
    return Index(shards=("a",), table=table, keys=np.array([b"%d" % row for row in range(len(sizes))]))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"short_side": ">= 480"}, [0, 1, 3, 5]),
        ([["long_side", "lambda s: s < 600"]], [2, 3]),
        ([["width", "> 500"], ["height", "> 500"]], [3, 5]),
        ({"aspect_ratio": "lambda r: 0.5 <= r <= 2"}, [0, 1, 3]),
        ({"megapixels": "<= 0.31"}, [0, 1, 2, 3]),
        ([[["width", "height"], "width == height"]], [3]),
        ([["width", ">= 0"]], [0, 1, 2, 3, 5]),
    ],
)
def test_pictures_of_other_sizes_and_of_none_are_left_out(given: Any, kept: list[int]) -> None:
    selection = size_selection(parse_size_filters(given), index(SIZES))
    assert np.flatnonzero(selection.kept).tolist() == kept
    assert selection.reason == "do not meet data.size_filters (1 of them have no known size)"


def test_pass_rates_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        size_selection(parse_size_filters({"short_side": ">= 480", "aspect_ratio": "<= 2"}), index(SIZES))
    assert "data.size_filters short_side: >= 480: 4 of 6 samples pass (66.7%)" in caplog.text
    assert "data.size_filters aspect_ratio: <= 2: 4 of 6 samples pass (66.7%)" in caplog.text


def test_many_samples_of_few_sizes_are_judged_by_their_sizes() -> None:
    filters = parse_size_filters({"short_side": ">= 480"})
    many = index(SIZES * 50_000)
    selection = size_selection(filters, many)
    assert selection.kept.sum() == 4 * 50_000
    assert selection.kept[:6].tolist() == [True, True, False, True, False, True]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"score": "> 4"}, "data.size_filters: score is no measure of a picture: choose width, .*data.row_filters"),
        ([["width", 4]], r"data.size_filters\[0\]=.* is not a pair of a key and a condition"),
        ("width > 4", "data.size_filters=width > 4 must be a list"),
        ({"width": "f(1)"}, "data.size_filters.width: 'f.1.' is refused at character 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_the_source_is_made(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tars.webdataset("a.tar", size_filters=given)


def sizes_tar(folder: Path) -> Path:
    files = [(f"{i:04d}.png", tars.picture(40 + i, 32)) for i in range(12)]
    return tars.write(folder / "a.tar", sorted([*files, *((f"{i:04d}.txt", b"text") for i in range(12))]))


def test_samples_left_out_are_not_drawn_and_a_resume_without_the_filter_is_refused(tmp_path: Path) -> None:
    path = sizes_tar(tmp_path)
    data = open_data_set(tars.webdataset(path, size_filters={"width": "< 46"}), share=None, held_out=None)
    assert data.training.rows.tolist() == [0, 1, 2, 3, 4, 5]
    feed = data.training_feed(seed=0, global_batch_size=3, micro_batch_size=3, rank=0, ranks=1)
    drawn = [row for _ in range(4) for batch in next(feed) for row in batch.index_B.tolist()]
    assert sorted(drawn) == sorted([0, 1, 2, 3, 4, 5] * 2)
    state = feed.state_dict()
    data.close()
    with (
        loading(tars.webdataset(path), global_batch_size=3, micro_batch_size=3, seed=0) as loader,
        pytest.raises(ConfigError, match="position does not fit this run.s data: rows was"),
    ):
        loader.load_state_dict(state)


def test_no_sample_left_is_refused(tmp_path: Path) -> None:
    source = tars.webdataset(sizes_tar(tmp_path), size_filters={"width": "> 1000"})
    with pytest.raises(ConfigError, match="no sample is left to read: 12 of 12 samples do not meet data.size_filters"):
        open_data_set(source, share=None, held_out=None)
