"""The cache of indexes; one that may not be read or written is no reason to stop, and earlier ones are used."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cascade_train.data.folder import Folder
from cascade_train.data.index.cache import cache_file, read_cache, write_cache
from cascade_train.data.index.mapped import one_at_a_time
from cascade_train.data.parquet import Columns, Parquet
from cascade_train.data.webdataset import WebDataset
from cascade_train.errors import Interrupted
from tests.unit.data import tars

# Indexes that commit a18770c wrote of a tar, of its files in a folder and of a parquet file. Their names follow that
# commit's rule, by which they depend on where the data lies, and are therefore made here.
FROZEN = Path(__file__).parent / "of_a18770c"
SECOND_NS = 10**9  # time of change of each file in the frozen indexes


def _refuse(*_: Any, **__: Any) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_lock_that_may_not_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "unlink", _refuse)
    read = []
    with one_at_a_time(tmp_path / "a.lock"):
        read.append("a")
    assert read == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]


def test_a_cached_index_that_may_not_be_read_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_cache(tmp_path / "none.npz") is None
    assert caplog.text == ""
    monkeypatch.setattr("cascade_train.data.index.cache.open_regular", _refuse)
    assert read_cache(tmp_path / "a.npz") is None
    assert "may not be read" in caplog.text


def test_a_write_that_is_stopped_or_fails_leaves_nothing(tmp_path, monkeypatch):
    def end(error):
        def savez(file, **parts):
            file.write_bytes(b"half")
            raise error

        monkeypatch.setattr(np, "savez", savez)

    end(Interrupted("Stopped by SIGTERM before the first step.", code=75))
    with pytest.raises(Interrupted):
        write_cache(tmp_path / "a.npz", {}, required=False)
    end(OSError(errno.ENOSPC, "No space left on device"))
    write_cache(tmp_path / "a.npz", {}, required=False)
    assert list(tmp_path.iterdir()) == []


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
    source = Folder(**{**tars.SMALL, "index_dir": str(root / "kept")}, path=str(root / "pics"), caption_from="file")
    return source, cache_file(root / "kept", "pics", f"{root / 'pics'}|{root / 'pics'}|sizes|1")


def tar(root: Path) -> tuple[WebDataset, Path]:
    path = root / "data.tar"
    extensions = ("jpg", "jpeg", "png", "webp", "txt", "json", "mask.png")
    text = f"{path}|{path.stat().st_size}|{SECOND_NS}|{extensions}|2"
    return tars.webdataset(path, index_dir=str(root / "kept")), cache_file(root / "kept", "data", text)


def parquet(root: Path) -> tuple[Parquet, Path]:
    path, columns = root / "data.parquet", Columns("image", "text", None, None)
    named = {"image_column": "image", "caption_column": "text", "root": None, "width_column": None}
    source = Parquet(**{**tars.SMALL, "index_dir": str(root / "kept")}, path=str(path), height_column=None, **named)
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
