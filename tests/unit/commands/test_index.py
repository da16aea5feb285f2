from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cascade_train.__main__ import launch
from cascade_train.data.data_set import open_data_set
from cascade_train.data.tar import index as tar_index
from tests.unit.data import tars


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(5):
        tars.write(tmp_path / f"{shard}.tar", tars.samples(range(10 * shard, 10 * shard + 4)))
    return tmp_path


def indexed(folder: Path, *more: str) -> int:
    return launch(["index", f'data.urls="{folder}/{{0..4}}.tar"', "model=c_tiny", *more])


def cached(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in (folder / ".cascade_train_index").iterdir())


def test_tars_are_indexed_by_several_processes_and_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_index, "MANY_TARS", 5)
    assert indexed(folder, "processes=2") == 0
    assert "5 tars were indexed, 0 had an index (" in capsys.readouterr().out
    assert cached(folder) == ["0", "1", "2", "3", "4", "joined"]
    monkeypatch.setattr(tar_index, "scan_shard", None)
    assert indexed(folder, "processes=1") == 0
    assert "0 tars were indexed, 5 had an index (" in (out := capsys.readouterr().out)
    assert "20 samples." in out


def test_jobs_share_the_tars_and_verdicts_of_filters_are_made_too(folder: Path) -> None:
    jobs = ("processes=1", "task_count=2", 'data.row_filters={score: "> 1"}')
    assert indexed(folder, "task_index=0", *jobs) == 0
    assert cached(folder) == ["0", "0", "2", "2", "4", "4"]
    assert indexed(folder, "task_index=1", *jobs) == 0
    assert cached(folder) == [str(shard) for shard in range(5) for _ in range(2)]


def test_verify_indexes_a_tar_again_whose_content_changed_behind_its_size_and_time(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_index, "MANY_TARS", 5)
    assert indexed(folder, "processes=1") == 0
    path = folder / "3.tar"
    content, times = path.read_bytes(), path.stat()
    path.write_bytes(content.replace(b"picture 31", b"picture 99"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert indexed(folder, "processes=1") == 0
    other = str(folder / "{2..3}.tar")
    monkeypatch.setattr(tar_index, "MANY_TARS", 2)
    stale = tars.webdataset(other).open().content_record
    assert indexed(folder, "processes=1", "verify=true") == 1
    assert tars.webdataset(other).open().content_record != stale
    assert "1 tars were indexed, 4 are as they were indexed" in capsys.readouterr().out
    assert indexed(folder, "processes=1", "verify=true") == 0
    assert len(tars.webdataset(str(folder / "{0..4}.tar")).open()) == 20


def test_verify_removes_a_joined_index_that_lies_beside_a_tar_of_another_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_index, "MANY_TARS", 2)
    (folder / "more").mkdir()
    path = (folder / "1.tar").rename(folder / "more" / "1.tar")
    urls, times = [str(folder / "0.tar"), str(path)], path.stat()
    stale = tars.webdataset(urls).open().content_record
    path.write_bytes(path.read_bytes().replace(b"picture 11", b"picture 99"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert tars.webdataset(urls).open().content_record == stale
    assert launch(["index", f"data.urls=[{','.join(urls)}]", "model=c_tiny", "processes=1", "verify=true"]) == 1
    assert tars.webdataset(urls).open().content_record != stale


def shift(array: np.ndarray) -> None:
    array[:] = np.roll(array, 1)


DAMAGE = {"table": lambda table: shift(table["caption_start"]), "keys": shift, "content": shift}


@pytest.mark.parametrize("name", [*DAMAGE, "rows"])
def test_verify_finds_a_joined_index_that_is_not_what_was_made(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tar_index, "MANY_TARS", 5)
    urls = str(folder / "{0..4}.tar")
    whole = open_data_set(tars.webdataset(urls), share=None, held_out=None).training
    captions = [whole.source.read(row).caption for row in range(20)]
    (file,) = (folder / ".cascade_train_index").glob(f"joined-*/**/{name}.npy")
    array = np.load(file, mmap_mode="r+")
    DAMAGE.get(name, shift)(array)
    array.flush()
    assert indexed(folder, "processes=1", "verify=true") == 1
    assert f"{name}.npy" in caplog.text
    source = tars.webdataset(urls)
    source.open()
    assert [source.read(row).caption for row in range(20)] == captions
    assert indexed(folder, "processes=1", "verify=true") == 0


@pytest.mark.parametrize(
    ("field", "value"), [("shard", 7), ("shard", -1), ("image_start", -512), ("json_bytes", 2**40)]
)
def test_a_row_that_lies_in_no_tar_is_found_as_the_index_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, field: str, value: int
) -> None:
    monkeypatch.setattr(tar_index, "MANY_TARS", 5)
    urls = str(folder / "{0..4}.tar")
    before = np.array(tars.webdataset(urls).open().table)
    (file,) = (folder / ".cascade_train_index").glob("joined-*/table.npy")
    table = np.load(file, mmap_mode="r+")
    table[field][11] = value
    table.flush()
    assert np.array_equal(tars.webdataset(urls).open().table, before)
    assert "is damaged" in caplog.text
