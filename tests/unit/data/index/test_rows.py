"""The index: names, digest and split of its rows, and changed content of the files of samples."""

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
    Index,
    changed_content,
    changed_rows,
    changed_samples,
    split,
)
from cascade_train.data.mixture import Mixture, Regularised
from cascade_train.data.parquet import Parquet
from cascade_train.data.table import Table
from cascade_train.data.webdataset import WebDataset
from tests.unit.data import tars

COLUMNS: dict[str, Any] = {**tars.SMALL, "image_column": "image", "caption_column": "text", "root": None}
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
    return Folder(**tars.SMALL, path=str(root / "pictures"), caption_from="file")


def tar(root: Path, captions: list[str]) -> WebDataset:
    images = [(root / "p" / name).read_bytes() for name in pictures(root / "p")]
    files = [(f"{r}.{e}", c) for r, t in enumerate(captions) for e, c in (("png", images[r]), ("txt", t.encode()))]
    return tars.webdataset(tars.write(root / "a.tar", files))


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
    path = tars.write(root / "a.tar", files)
    return ClassTars(**tars.SMALL, urls=str(path), idx_to_prompt=str(root / "prompts.json"))


def class_folders(root: Path, captions: list[str]) -> ClassFolders:
    (root / "prompts.json").write_text(json.dumps({"0": captions}))
    (root / "all").mkdir(exist_ok=True)
    pictures(root / "all" / "0")
    return ClassFolders(**tars.SMALL, path=str(root / "all"), idx_to_prompt=str(root / "prompts.json"))


def mixture(root: Path, captions: list[str]) -> Mixture:
    return Mixture(**tars.ORDER, sources={"a": folder(root, captions)}, repeats=None, shares=None, loss_weights=None)


def regularised(root: Path, captions: list[str]) -> Regularised:
    (root / "b").mkdir(exist_ok=True)
    own, other = folder(root, captions), tar(root / "b", CAPTIONS)
    return Regularised(**tars.ORDER, source=own, regularisation=other, share=0.5, weight=1.0)


ONE_BY_ONE = [folder, tar, table, parquet, mixture, regularised]


@pytest.mark.parametrize("make", [*ONE_BY_ONE, class_tar, class_folders])
def test_another_caption_of_the_same_length_is_another_content(make: Make, tmp_path: Path) -> None:
    before = make(tmp_path, CAPTIONS).open()
    after = make(tmp_path, [*CAPTIONS[:-1], "A caption 5"]).open()
    changed = changed_rows(after, before)
    assert after.digest == before.digest
    assert [after.name(row)[-5:] for row in changed] == [after.name(5)[-5:]] if make in ONE_BY_ONE else len(changed)
    text = f"the files behind data changed ({changed_samples(after, before)}); put them back"
    assert changed_content(after, {"content": before.content_record}) == [text]


@pytest.mark.parametrize("make", ONE_BY_ONE)
def test_what_is_copied_without_its_times_is_the_same(make: Make, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    before = make(tmp_path / "here", CAPTIONS).open()
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copy)
    for path in (tmp_path / "there").rglob("*.*"):
        os.utime(path, (1, 1))
    after = make(tmp_path / "there", CAPTIONS).open()
    assert (after.digest, changed_samples(after, before)) == (before.digest, None)


def test_another_picture_value_or_mask_counts_where_it_makes_the_sample(tmp_path: Path) -> None:
    before = folder(tmp_path, CAPTIONS).open()
    (tmp_path / "pictures" / "3.png").write_bytes(tars.picture(16, 16, tint=200))
    (tmp_path / "pictures" / "4.json").write_text("{}")
    (tmp_path / "pictures" / "5.mask.png").write_bytes(tars.picture(16, 16))
    with_mask = folder(tmp_path, CAPTIONS).open()
    assert changed_rows(with_mask, before).tolist() == [3, 5]
    assert changed_samples(with_mask, before) == "pictures:3.png, pictures:5.png"


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


KEYS = [f"{i:05d}" for i in range(2000)]


def test_every_row_is_on_one_side_and_a_larger_share_holds_out_what_a_smaller_one_did() -> None:
    train, held_out = split(tars.index(KEYS), 0.1)
    assert sorted([*train, *held_out]) == list(range(2000))
    assert 150 < len(held_out) < 250
    assert train.dtype == np.int64
    assert set(held_out) < set(split(tars.index(KEYS), 0.3)[1])
    assert list(map(len, split(tars.index(KEYS), 0.0))) == [2000, 0]


def test_added_data_moves_no_key() -> None:
    few, many = tars.index(KEYS[500:700]), tars.index(KEYS)
    held_few = {few.name(row) for row in split(few, 0.2)[1]}
    held_many = {many.name(row) for row in split(many, 0.2)[1]}
    assert held_few == {name for name in held_many if name in {few.name(row) for row in range(200)}}
