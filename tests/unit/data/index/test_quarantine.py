from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from cascade_train.data.data_set import open_data_set
from cascade_train.data.index.quarantine import quarantine_selection, read_quarantine
from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.errors import ConfigError
from tests.unit.data.test_shapes import shapes


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


@pytest.mark.parametrize("text", ["a:1\n", '{"name": "a:1"}\n', "[1]\n", line("a:1") + "\n" + line("a:2")])
def test_a_line_without_a_sample_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"data.quarantine: line . of .*rank_0.jsonl names no sample, as"):
        read_quarantine(listing(tmp_path, text))


def test_a_path_without_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="is no list of unreadable samples, nor a run that met one"):
            read_quarantine(path)


def test_rows_are_found_by_shard_and_key(caplog: pytest.LogCaptureFixture) -> None:
    table = np.zeros(5, dtype=ROW_FIELDS)
    table["shard"] = [0, 0, 1, 1, 1]
    keys = np.array([b"x:1", b"2", b"x:1", b"2", "猫".encode()])
    index = Index(shards=("a", "b:c"), table=table, keys=keys)
    with caplog.at_level(logging.INFO):
        selection = quarantine_selection({"a:x:1", "b:c:2", "b:c:猫", "a:3", "b:2"}, index)
    assert selection.kept.tolist() == [False, True, True, False, False]
    assert "data.quarantine: 2 of 5 names are not in this data." in caplog.text
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
