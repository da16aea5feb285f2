from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cascade_train.data.buckets import Buckets
from cascade_train.data.data_set import DataSet, open_data_set
from cascade_train.data.index.rows import Index, MappedArray, mapped
from cascade_train.data.tar import index as tar_index
from tests.unit.data import tars


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_index, "MANY_TARS", 1)


def sized(folder: Path) -> str:
    """Write four tars with pictures of several shapes, one without a caption, and scores; return their url."""
    for shard in range(4):
        files: list[tuple[str, bytes]] = [("none.png", tars.picture())] if shard == 1 else []
        for key in range(10):
            shape = [(40, 40), (64, 32), (30, 60)][key % 3]
            name = f"{shard}{key:0{shard + 1}d}"
            score = json.dumps({"score": key}).encode()
            files += [(f"{name}.png", tars.picture(*shape)), (f"{name}.txt", b"x"), (f"{name}.json", score)]
        tars.write(folder / f"{shard}.tar", files)
    return str(folder / "{0..3}.tar")


FILTERED: dict[str, Any] = {"row_filters": {"score": "> 2"}, "size_filters": {"width": ">= 40"}}


def cached(folder: Path, name: str = "joined-*") -> list[Path]:
    return sorted((folder / ".cascade_train_index").glob(name))


@pytest.mark.parametrize("options", [{}, FILTERED], ids=["all", "filtered"])
def test_the_index_of_many_tars_is_that_of_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO)
    url = sized(tmp_path)

    def opened() -> tuple[Index, list[str]]:
        caplog.clear()
        return tars.webdataset(url, **options).open(), [record.message for record in caplog.records]

    few, few_log = opened()
    monkeypatch.setattr(tar_index, "MANY_TARS", 4)
    first, first_log = opened()
    monkeypatch.setattr(tar_index, "load_shard", None)  # nothing is read of each tar
    again, again_log = opened()
    for many in (first, again):
        assert isinstance(many.table, MappedArray)
        assert all(np.array_equal(getattr(few, name), getattr(many, name)) for name in ("table", "keys", "content"))
        assert (few.digest, few.content_record) == (many.digest, many.content_record)
    assert few_log == first_log == again_log
    assert any("1 keys with a picture but no caption" in line for line in few_log)
    assert len(few) == (28 if options else 40)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"aspect_ratios": ["1/1", "1/2"], "replacement": True},
    {"aspect_ratios": ["1/1", "1/2"], "buckets": Buckets(multiple_px=8, random_share=0.5, max_upscale=1.5)},
    FILTERED,
]


@pytest.mark.parametrize(("options", "share"), [({}, None), *((options, 0.4) for options in OPTIONS)])
def test_splits_shapes_steps_and_states_are_those_of_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], share: float | None
) -> None:
    url = sized(tmp_path)
    options = {"image_size": 32, "buckets": Buckets(multiple_px=8), **options}

    def told(data: DataSet) -> list[Any]:
        found: list[Any] = [data.identity]
        for part in (data.training, data.held_out):
            if part is not None:
                sizes = {"global_batch_size": 4, "micro_batch_size": 2, "rank": 0, "ranks": 1}
                feed: Any = part.load(seed=3, **sizes)
                steps = [feed._order.step(position) for position in range(30)]
                found += [part.rows.tolist(), part.shapes.tolist(), feed.report(), feed._order.state(20)]
                found += [(step.rows.tolist(), step.epochs.tolist(), step.height, step.width) for step in steps]
                found += [{shape: rows.tolist() for shape, rows in feed._order.stand_ins().items()}]
        return found

    def opened() -> DataSet:
        return open_data_set(tars.webdataset(url, **options), share=share, held_out=None)

    few = told(opened())
    monkeypatch.setattr(tar_index, "MANY_TARS", 4)
    first, again = told(opened()), opened()
    assert few == first
    monkeypatch.setattr("cascade_train.data.index.rows._written", None)  # all that the data's length decides is there
    assert told(again) == few
    assert isinstance(again.training.rows, MappedArray)


DAMAGE: list[tuple[str, Callable[[Path], Any]]] = [
    ("table.npy", lambda file: os.truncate(file, file.stat().st_size - 8)),
    ("keys.npy", lambda file: file.write_bytes(b"x" * file.stat().st_size)),
    ("table.npy", lambda file: (file.unlink(), os.mkfifo(file))),
    ("made.json", lambda file: file.write_text(file.read_text() + " " * 2**20)),  # more than is ever written
    ("content.npy", Path.unlink),
]


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_a_damaged_folder_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], Any]
) -> None:
    url = sized(tmp_path)
    before = tars.webdataset(url).open()
    (folder,) = cached(tmp_path)
    damage(folder / name)
    again = tars.webdataset(url).open()
    assert caplog.text.count(" is damaged (") == 1
    assert again.keys.tolist() == [b"00", b"01", *again.keys.tolist()[2:]]
    assert len(again.keys) == len(before.keys) == 40
    caplog.clear()
    tars.webdataset(url).open()
    assert " is damaged (" not in caplog.text


def test_a_kill_while_it_is_written_leaves_no_folder_of_that_name(tmp_path: Path) -> None:
    def killed(folder: Path) -> None:
        np.save(folder / "a.npy", np.arange(5))
        os._exit(9)

    if (child := os.fork()) == 0:
        mapped(tmp_path / "of", killed)
    os.waitpid(child, 0)
    assert not (tmp_path / "of").exists()
    (left,) = tmp_path.glob(".partial-*")
    os.utime(left, (0, 0))
    assert mapped(tmp_path / "of", lambda folder: np.save(folder / "a.npy", np.arange(2)))["a"].tolist() == [0, 1]
    assert not left.exists()


def test_what_is_sent_to_a_process_is_the_place_and_not_the_content(tmp_path: Path) -> None:
    table = np.arange(200_000, dtype=np.int64).reshape(-1, 2)
    found = mapped(tmp_path / "of", lambda folder: np.save(folder / "a.npy", table))["a"]
    for part, wanted in ((found, table), (found[70_001:], table[70_001:]), (found[3], table[3])):
        sent = pickle.dumps(part)
        assert len(sent) < 1000
        assert np.array_equal(pickle.loads(sent), wanted)
    assert np.array_equal(pickle.loads(pickle.dumps(found[:, 1])), table[:, 1])
    assert np.array_equal(pickle.loads(pickle.dumps(found + 1)), table + 1)
