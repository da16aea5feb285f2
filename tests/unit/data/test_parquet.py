"""Parquet files: pictures in columns or files, row groups as shards, columns as metadata."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from cascade_train.data import parquet as parquet_files
from cascade_train.data.captions import Captions
from cascade_train.data.parquet import Parquet
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.errors import ConfigError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import DatasetContract


def parquet(path: Any, **options: Any) -> Parquet:
    columns = {"image_column": "image", "caption_column": "text", "width_column": None, "height_column": None}
    options = {**tars.SMALL, **columns, "root": None, **options}
    return Parquet(path=path if isinstance(path, list) else str(path), **options)


def write(path: Path, rows: list[dict[str, Any]], group: int = 4) -> Path:
    """Write rows into a file, `group` of them in a row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


def rows_of(numbers: range, **more: Any) -> list[dict[str, Any]]:
    return [{"image": tars.picture(tint=n), "text": f"picture {n}", **more} for n in numbers]


class TestParquet(DatasetContract):
    order_digest = "c59c57df5a7d9f9e"
    samples = 37

    @classmethod
    def make_source(cls, folder: Path, **options: Any) -> Parquet:
        if not (folder / "set").exists():
            write(folder / "set/0.parquet", rows_of(range(20)), group=8)
            write(folder / "set/below/1.parquet", rows_of(range(20, 37)), group=20)
        return parquet(folder / "set", **options)


def test_row_groups_are_shards_and_rows_come_from_them(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", rows_of(range(3)), group=2)
    write(tmp_path / "a.parquet", rows_of(range(3, 5)), group=2)
    source = parquet(tmp_path)
    index = source.open()
    assert index.shards == ("a.parquet#0", "b.parquet#0", "b.parquet#1")
    assert [source.read(row).caption for row in range(5)] == [f"picture {n}" for n in (3, 4, 0, 1, 2)]
    assert source.read(4).image == tars.picture(tint=2)
    assert source.read(4).key == index.name(4) == "b.parquet#1:b.parquet/00000002"
    assert set(index.table["width"].tolist()) == {40}


def test_pictures_may_be_bytes_or_paths_or_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.png").write_bytes(tars.picture(10, 20))
    inside = {"bytes": tars.picture(), "path": "far/away.png"}
    both = write(tmp_path / "both.parquet", [
        {"image": inside, "text": "one"},
        {"image": {"bytes": None, "path": "a.png"}, "text": "two"},
        {"image": {"bytes": None, "path": "absent.png"}, "text": "three"},
        {"image": None, "text": "four"},
        {"image": inside, "text": None},
    ])  # fmt: skip
    source = parquet(both)
    index = source.open()
    assert index.keys.tolist() == [b"far/away.png", b"a.png"]
    assert index.table["width"].tolist() == [40, 10]
    assert [source.read(row).image for row in (0, 1)] == [tars.picture(), tars.picture(10, 20)]
    assert "left out 2 rows without a picture or a caption" in caplog.text
    assert "left out 1 rows whose pictures are not there: absent.png" in caplog.text
    paths = write(tmp_path / "paths/paths.parquet", [{"image": "a.png", "text": "two"}])
    source = parquet(paths, root=str(tmp_path))
    assert (source.open().table["height"].tolist(), source.read(0).image) == ([20], tars.picture(10, 20))


def test_columns_are_filtered_and_serve_captions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**row, "score": score} for row, score in zip(rows_of(range(4)), (5.0, 3.0, None, 6.0), strict=True)]
    path = write(tmp_path / "a.parquet", rows, group=2)
    captions = Captions(template="{caption}, {score}")
    with caplog.at_level(logging.INFO):
        source = parquet(path, row_filters={"score": "> 4"}, captions=captions)
        assert len(source.open()) == 2
    assert "score: > 4: 2 pass (50.0%), 1 lack the key" in caplog.text
    assert source.read(1).values == {"text": "picture 3", "score": 6.0}
    with pytest.raises(ConfigError, match="row_filters leave no sample"):
        parquet(path, row_filters={"absent": "> 4"}).open()


def test_row_groups_in_memory_are_few_and_each_copy_reads_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = parquet(write(tmp_path / "a.parquet", rows_of(range(12)), group=2), shuffle_window_shards=1)
    source.open()
    read = []
    group_of = parquet_files._read_group

    def watched(path: Path, group: int, names: Any) -> Any:
        read.append(group)
        return group_of(path, group, names)

    monkeypatch.setattr(parquet_files, "_read_group", watched)
    for row in (0, 2, 1, 3, 4, 5, 2):
        source.read(row)
    assert read == [0, 1, 2]
    source.read(0)
    assert read == [0, 1, 2, 0]
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read(0).caption == "picture 0"
    assert read == [0, 1, 2, 0, 0]


def test_damage_is_found_at_the_start_and_during_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [*rows_of(range(3)), {"image": b"no picture", "text": "x"}])
    source = parquet(path)
    assert source.open().table["width"].tolist() == [40, 40, 40, 0]
    path.write_bytes(b"PAR1" + bytes(200))
    with pytest.raises(UnreadableSampleError, match="row group 0 of .* is damaged"):
        source.read(0)
