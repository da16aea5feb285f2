"""What counts as changed content: what is in the files that make a sample, and nothing else about them."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cascade_train.data.classification import ClassFolders, ClassTars
from cascade_train.data.folder import Folder
from cascade_train.data.index.rows import (
    ROW_FIELDS,
    Index,
    changed_content,
    changed_rows,
    changed_samples,
    content_record,
)
from cascade_train.data.mixture import Mixture, Regularised
from cascade_train.data.parquet import Parquet
from cascade_train.data.shapes import Shapes
from cascade_train.data.table import Table
from cascade_train.data.webdataset import WebDataset
from tests.unit.data import tars

LOADING: dict[str, Any] = {
    "image_size": 16, "crop": "center", "shuffle_window_shards": 1, "num_workers": 0, "worker_start": "fork",
}  # fmt: skip
FILES: dict[str, Any] = {**LOADING, "index_dir": None, "row_filters": None}
COLUMNS: dict[str, Any] = {**FILES, "image_column": "image", "caption_column": "text", "root": None}
CAPTIONS = [f"a caption {row}" for row in range(6)]
Make = Callable[[Path, list[str]], Any]


def pictures(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    for row in range(len(CAPTIONS)):
        path = folder / f"{row}.png"
        if not path.exists():
            path.write_bytes(tars.picture(16, 16, tint=row))
    return [f"{row}.png" for row in range(len(CAPTIONS))]


def folder(root: Path, captions: list[str]) -> Folder:
    pictures(root / "pictures")
    for row, caption in enumerate(captions):
        (root / "pictures" / f"{row}.txt").write_text(caption)
    return Folder(**FILES, path=str(root / "pictures"), caption_from="file")


def tar(root: Path, captions: list[str]) -> WebDataset:
    images = [(root / "p" / name).read_bytes() for name in pictures(root / "p")]
    files = [(f"{r}.{e}", c) for r, t in enumerate(captions) for e, c in (("png", images[r]), ("txt", t.encode()))]
    return WebDataset(**FILES, urls=str(tars.write(root / "a.tar", files)))


def table(root: Path, captions: list[str]) -> Table:
    rows = zip(pictures(root), captions, strict=True)
    (root / "t.jsonl").write_text("".join(json.dumps({"image": i, "text": t}) + "\n" for i, t in rows))
    return Table(**COLUMNS, path=str(root / "t.jsonl"), mask_column=None)


def parquet(root: Path, captions: list[str]) -> Parquet:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    images = [(root / "p" / name).read_bytes() for name in pictures(root / "p")]
    write_table(arrow.table({"image": images, "text": captions}), root / "t.parquet")
    return Parquet(**COLUMNS, path=str(root / "t.parquet"), width_column=None, height_column=None)


def class_tar(root: Path, captions: list[str]) -> ClassTars:
    (root / "prompts.json").write_text(json.dumps({"0": captions}))
    files = [(f"{r}.{e}", c) for r in range(6) for e, c in (("cls", b"0"), ("png", tars.picture(16, 16, tint=r)))]
    return ClassTars(**FILES, urls=str(tars.write(root / "a.tar", files)), idx_to_prompt=str(root / "prompts.json"))


def class_folders(root: Path, captions: list[str]) -> ClassFolders:
    (root / "prompts.json").write_text(json.dumps({"0": captions}))
    (root / "all").mkdir(exist_ok=True)
    pictures(root / "all" / "0")
    return ClassFolders(**FILES, path=str(root / "all"), idx_to_prompt=str(root / "prompts.json"))


def mixture(root: Path, captions: list[str]) -> Mixture:
    return Mixture(**LOADING, sources={"a": folder(root, captions)}, repeats=None, shares=None, loss_weights=None)


def regularised(root: Path, captions: list[str]) -> Regularised:
    (root / "b").mkdir(exist_ok=True)
    own, other = folder(root, captions), tar(root / "b", CAPTIONS)
    return Regularised(**LOADING, source=own, regularisation=other, share=0.5, weight=1.0)


ONE_BY_ONE = [folder, tar, table, parquet, mixture, regularised]


@pytest.mark.parametrize("make", [*ONE_BY_ONE, class_tar, class_folders])
def test_another_caption_of_the_same_length_is_another_content(make: Make, tmp_path: Path) -> None:
    before = make(tmp_path, CAPTIONS).open()
    after = make(tmp_path, [*CAPTIONS[:-1], "A caption 5"]).open()
    changed = changed_rows(after, before)
    assert after.digest == before.digest
    assert [after.name(row)[-5:] for row in changed] == [after.name(5)[-5:]] if make in ONE_BY_ONE else len(changed)
    text = f"the files behind data changed ({changed_samples(after, before)}); put them back"
    assert changed_content(after, {"content": content_record(before)}) == [text]


@pytest.mark.parametrize("make", ONE_BY_ONE)
def test_what_is_copied_without_its_times_is_the_same(make: Make, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    before = make(tmp_path / "here", CAPTIONS).open()
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copy)
    for path in (tmp_path / "there").rglob("*.*"):
        os.utime(path, (1, 1))
    assert changed_samples(make(tmp_path / "there", CAPTIONS).open(), before) is None


def test_another_picture_value_or_mask_counts_where_it_makes_the_sample(tmp_path: Path) -> None:
    before = folder(tmp_path, CAPTIONS).open()
    (tmp_path / "pictures" / "3.png").write_bytes(tars.picture(16, 16, tint=200))
    (tmp_path / "pictures" / "4.json").write_text("{}")
    (tmp_path / "pictures" / "5.mask.png").write_bytes(tars.picture(16, 16))
    with_mask = folder(tmp_path, CAPTIONS).open()
    assert changed_rows(with_mask, before).tolist() == [3, 5]
    assert changed_samples(with_mask, before) == "pictures:3.png, pictures:5.png"


def test_files_that_did_not_change_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, CAPTIONS).open()
    (tmp_path / "pictures" / "2.txt").write_text("another")
    opened, real = list[str](), Path.open
    monkeypatch.setattr(Path, "open", lambda path, *rest: opened.append(path.name) or real(path, *rest))
    Folder(**FILES, path=str(tmp_path / "pictures"), caption_from="file").open()
    assert sorted(name for name in opened if not name.endswith(".npz")) == ["2.txt"]


def test_another_beginning_of_a_streamed_tar_is_another_content(tmp_path: Path) -> None:
    def streamed(captions: list[str]) -> Index:
        source = tar(tmp_path, captions)
        (tmp_path / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes(), 0, mtime=0))
        source.urls = str(tmp_path / "a.tar.gz")
        return source.open()

    before = streamed(CAPTIONS)
    after = streamed([*CAPTIONS[:-1], "A caption 5"])
    assert after.digest == before.digest
    assert changed_samples(after, before) == "a.tar.gz:a.tar.gz"
    assert changed_samples(streamed(CAPTIONS), before) is None


def test_samples_without_files_are_known_to_be_the_same(caplog: pytest.LogCaptureFixture) -> None:
    shapes = Shapes(**LOADING, samples=3, seed=0).open()
    assert changed_content(shapes, {"content": content_record(shapes)}) == []
    assert not caplog.records


def million(content: np.ndarray) -> Index:
    keys = np.array([f"{row:07d}".encode() for row in range(len(content))])
    return Index(shards=("a",), table=np.zeros(len(content), dtype=ROW_FIELDS), keys=keys, content=content)


def test_the_record_of_a_million_samples_is_small_and_names_a_range() -> None:
    content = np.arange(1, 1_000_001, dtype=np.uint64)
    saved = {"content": content_record(million(content))}
    assert len(json.dumps(saved)) < 1000
    assert changed_content(million(content.copy()), saved) == []
    content[500_000] += 1
    text = "the files behind data changed (a:0500000 to a:0515624); put them back"
    assert changed_content(million(content), saved) == [text]


def test_content_that_an_earlier_version_did_not_record_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    content = np.arange(1, 129, dtype=np.uint64)
    saved = content_record(million(content))
    content[:1] = 0
    assert changed_content(million(content), {"content": saved}) == []
    assert [record.getMessage()[:36] for record in caplog.records] == ["Whether files of the data changed is"]
    content[100] = 999
    assert len(changed_content(million(content), {"content": saved})) == 1
    assert changed_content(million(content), {}) == []
