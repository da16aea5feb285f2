"""Indexes that commit a18770c wrote of a tar, of its files in a folder and of a parquet file are used as they are.

Their names follow that commit's rule, by which they hold where the data lies, and are therefore made here.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cascade_train.data.folder import Folder
from cascade_train.data.index.cache import cache_file
from cascade_train.data.parquet import Columns, Parquet
from cascade_train.data.webdataset import WebDataset
from tests.unit.data import tars

FROZEN = Path(__file__).parent / "of_a18770c"
SECOND_NS = 10**9  # time of change of each file in the frozen indexes
OPTIONS: dict[str, Any] = {
    "image_size": 16, "crop": "center", "shuffle_window_shards": 1, "num_workers": 0, "worker_start": "fork",
    "row_filters": None,
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("data.tar", "data.parquet"):
        shutil.copyfile(FROZEN / name, tmp_path / name)
    with tarfile.open(FROZEN / "data.tar") as archive:
        archive.extractall(tmp_path / "pics", filter="data")
    for path in [*tmp_path.glob("data.*"), *(tmp_path / "pics").iterdir()]:
        os.utime(path, (1, 1))
    return tmp_path


def folder(root: Path) -> tuple[Folder, Path]:
    source = Folder(**OPTIONS, index_dir=str(root / "kept"), path=str(root / "pics"), caption_from="file")
    return source, cache_file(root / "kept", "pics", f"{root / 'pics'}|{root / 'pics'}|sizes|1")


def tar(root: Path) -> tuple[WebDataset, Path]:
    path = root / "data.tar"
    extensions = ("jpg", "jpeg", "png", "webp", "txt", "json", "mask.png")
    text = f"{path}|{path.stat().st_size}|{SECOND_NS}|{extensions}|2"
    return WebDataset(**OPTIONS, index_dir=str(root / "kept"), urls=str(path)), cache_file(root / "kept", "data", text)


def parquet(root: Path) -> tuple[Parquet, Path]:
    path, columns = root / "data.parquet", Columns("image", "text", None, None)
    named = {"image_column": "image", "caption_column": "text", "root": None, "width_column": None}
    source = Parquet(**OPTIONS, index_dir=str(root / "kept"), path=str(path), height_column=None, **named)
    text = f"{path}|{path.stat().st_size}|{SECOND_NS}|{columns}|1"
    return source, cache_file(root / "kept", "data", text)


@pytest.mark.parametrize("make", [folder, tar, parquet])
def test_an_earlier_index_is_used_as_it_is_with_content_unknown(
    make: Callable[[Path], tuple[Any, Path]], root: Path
) -> None:
    source, kept = make(root)
    kept.parent.mkdir()
    shutil.copyfile(FROZEN / f"{make.__name__}.npz", kept)
    index = source.open()
    assert index.content.tolist() == [0, 0]
    assert index.table["width"].tolist() == [16, 16]
    assert list(kept.parent.iterdir()) == [kept]
    assert kept.read_bytes() == (FROZEN / f"{make.__name__}.npz").read_bytes()


def test_of_a_folder_with_an_earlier_index_only_what_changed_since_is_read_and_known(root: Path) -> None:
    source, kept = folder(root)
    kept.parent.mkdir()
    shutil.copyfile(FROZEN / "folder.npz", kept)
    (root / "pics" / "1.png").write_bytes(tars.picture(16, 16, tint=9))
    assert (source.open().content > 0).tolist() == [False, True]
    assert (folder(root)[0].open().content > 0).tolist() == [False, True]
