"""Samples that make a step not finite, and the list of those that a run could not read."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from cascade_train.batch import Unreadable
from cascade_train.data.index.selection import QUARANTINE_FOLDER, read_quarantine
from cascade_train.data.sample import by_reason
from cascade_train.engine.faults.bad_samples import Trace, UnreadableList, not_finite


def rows(file: Path) -> list[tuple[str, int]]:
    return [(row["sample"], row["step"]) for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())]


def test_each_rank_lists_what_it_met_since_the_last_time(tmp_path: Path) -> None:
    met: list[Unreadable] = []
    listed = UnreadableList(tmp_path / QUARANTINE_FOLDER, rank=1, met=met)
    listed.write(1)
    assert not (tmp_path / QUARANTINE_FOLDER).exists()
    met += [Unreadable("a:猫 (1).jpg", "no picture"), Unreadable("a:2", "cut short")]
    listed.write(2)
    met.append(Unreadable("a:3", "cut short"))
    listed.write(5)
    listed.write(6)
    file = tmp_path / QUARANTINE_FOLDER / "rank_1.jsonl"
    assert rows(file) == [("a:猫 (1).jpg", 2), ("a:2", 2), ("a:3", 5)]
    assert json.loads(file.read_text(encoding="utf-8").splitlines()[0])["reason"] == "no picture"
    assert read_quarantine(tmp_path) == {"a:猫 (1).jpg", "a:2", "a:3"}


def test_a_resumed_run_lists_a_sample_once_and_mends_a_torn_line(tmp_path: Path) -> None:
    UnreadableList(tmp_path, rank=0, met=[Unreadable("a:1", "x")]).write(3)
    file = tmp_path / "rank_0.jsonl"
    with file.open("a") as handle:
        handle.write('{"sample": "a:2", "rea')
    UnreadableList(tmp_path, rank=0, met=[Unreadable("a:1", "y"), Unreadable("a:2", "x")]).write(4)
    assert rows(file) == [("a:1", 3), ("a:2", 4)]


def test_a_disk_that_refuses_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "rank_0.jsonl").write_text("edited by hand\n")
    with caplog.at_level(logging.WARNING):
        for folder in (tmp_path / "file", tmp_path):
            UnreadableList(folder, rank=0, met=[Unreadable("a:1", "x")]).write(3)
    assert caplog.text.count("could not be written, or read before") == 2


def test_names_that_are_no_text_or_hold_ends_of_lines_are_kept(tmp_path: Path) -> None:
    names = {"a:line\u2028separator\n", "a:not utf-8 \udcff"}
    UnreadableList(tmp_path, rank=0, met=[Unreadable(name, "x") for name in names]).write(3)
    UnreadableList(tmp_path, rank=0, met=[Unreadable(name, "x") for name in names]).write(4)
    assert read_quarantine(tmp_path) == names
    assert [step for _, step in rows(tmp_path / "rank_0.jsonl")] == [3, 3]


def test_of_a_name_and_a_reason_from_outside_only_so_much_is_shown(tmp_path: Path) -> None:
    met = Unreadable("a.tar:" + "x-amz-" * 20_000, "no " * 10**6)
    UnreadableList(tmp_path, rank=0, met=[met]).write(3)
    (line,) = map(json.loads, (tmp_path / "rank_0.jsonl").read_text(encoding="utf-8").splitlines())
    assert line["sample"] == met.name, "it is left out by this name"
    assert len(line["reason"]) < 1100
    assert len(str(met)) < 1400
    assert len(by_reason([met])) < 1400


NAN, INF = float("nan"), float("inf")


def trace(step, *losses, norm=1.0):
    keys = tuple(f"{step}:{i}" for i in range(len(losses)))
    return Trace(step, "main", keys, torch.tensor(losses), torch.tensor(norm))


def test_samples_at_fault_are_named_with_the_key_that_leaves_them_out(world):
    bad = trace(7, 1.0, NAN, 2.0, INF)
    assert not bool(bad.is_finite())
    error = not_finite(bad, excluded=["it's"])
    assert error.shared
    text = str(error)
    assert text.startswith("Step 7, phase main: the loss of 2 of 4 samples is not finite (rank 0: 7:1, rank 0: 7:3).")
    assert """ 'data.exclude=["7:1", "7:3", "it'"'"'s"]' """ in text


@pytest.mark.parametrize("bad", [trace(7, 1.0, 2.0, norm=INF), trace(7, NAN, NAN), trace(7, 1.0, *[NAN] * 9)])
def test_no_sample_is_blamed_where_none_stands_out(world, bad):
    text = str(not_finite(bad))
    assert "data.exclude" not in text
    assert "Remedy: lower optimizer.lr" in text
