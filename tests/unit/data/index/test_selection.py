from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cascade_train.data.data_set import open_data_set
from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.data.index.selection import (
    RowSelector,
    Selection,
    parse_size_filters,
    quarantine_selection,
    read_quarantine,
    selected,
    size_selection,
)
from tests.unit.data import tars
from tests.unit.data.test_shapes import shapes

SIZES = [(640, 480), (480, 640), (100, 400), (512, 512), (0, 0), (3000, 1000)]


def without(*rows: int) -> RowSelector:
    def select(index: Index) -> Selection:
        return Selection(kept=~np.isin(np.arange(len(index)), rows), reason="are not wanted")

    return select


def test_rows_that_any_selector_refuses_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    index = shapes(samples=6).open()
    with caplog.at_level(logging.INFO):
        assert np.flatnonzero(selected(index, [without(0, 1), without(1, 5), without()])).tolist() == [2, 3, 4]
    assert caplog.messages == ["Left out: 2 of 6 samples are not wanted."] * 2


def index(sizes: list[tuple[int, int]]) -> Index:
    width, height = np.array(sizes).T
    return tars.index(map(str, range(len(sizes))), width=width, height=height)


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


def line(name: str) -> str:
    return json.dumps({"sample": name, "reason": "damaged", "step": 3}, ensure_ascii=False) + "\n"


def listing(folder: Path, *ranks: str) -> Path:
    (folder / "quarantine").mkdir()
    for rank, text in enumerate(ranks):
        (folder / "quarantine" / f"rank_{rank}.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_the_lists_of_all_ranks_are_read_from_a_run_its_folder_or_one_file(tmp_path: Path) -> None:
    run = listing(tmp_path, line("a:1") + line("a:猫 (1)"), line("a:2"))
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert read_quarantine(run) == read_quarantine(run / "quarantine") == {"a:1", "a:猫 (1)", "a:2"}
    assert read_quarantine(run / "quarantine" / "rank_1.jsonl") == {"a:2"}


def test_a_line_torn_by_a_kill_counts_as_none(tmp_path: Path) -> None:
    run = listing(tmp_path, line("a:1") + '{"sample": "a:', line("a:2") + line("a:3").strip())
    assert read_quarantine(run) == {"a:1", "a:2", "a:3"}


def test_rows_are_found_by_shard_and_key(caplog: pytest.LogCaptureFixture) -> None:
    table = np.zeros(7, dtype=ROW_FIELDS)
    table["shard"] = [0, 0, 1, 1, 1, 1, 1]
    keys = np.array([b"x:1", b"2", b"x:1", b"2", "猫".encode(), "no\xa0break".encode(), b"caf\xe9"])
    index = Index(shards=("a", "b:c"), table=table, keys=keys)
    odd = {index.name(5), index.name(6)}  # of which escapes are listed
    with caplog.at_level(logging.INFO):
        selection = quarantine_selection({"a:x:1", "b:c:2", "b:c:猫", "a:3", "b:2", *odd}, index)
    assert selection.kept.tolist() == [False, True, True, False, False, False, False]
    assert "data.quarantine: 2 of 7 names are not in this data." in caplog.text
    assert quarantine_selection(set(), index).kept.all()


def test_listed_samples_take_no_part_and_the_others_keep_their_side(tmp_path: Path) -> None:
    before = open_data_set(shapes(samples=60), share=0.2, held_out=None)
    assert before.held_out is not None
    names = [before.training.index.name(int(rows[0])) for rows in (before.training.rows, before.held_out.rows)]
    run = listing(tmp_path, "".join(map(line, names)))
    after = open_data_set(shapes(samples=60, quarantine=str(run)), share=0.2, held_out=None)
    assert after.held_out is not None
    assert after.training.rows.tolist() == before.training.rows[1:].tolist()
    assert after.held_out.rows.tolist() == before.held_out.rows[1:].tolist()
