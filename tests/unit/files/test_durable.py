"""Files that survive a crash."""

import errno
import os
import time

import pytest

from cascade_train.errors import Interrupted
from cascade_train.files.durable import append_durably, remove_abandoned, sync, write_durably


def test_a_text_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    write_durably(path, "old")
    write_durably(path, "new ü")
    assert path.read_text(encoding="utf-8") == "new ü"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), Interrupted("No space left", code=75)])
def test_a_failed_write_leaves_the_old_text_and_no_other_file(tmp_path, monkeypatch, error):
    path = tmp_path / "a.json"
    write_durably(path, "old")

    def full(handle):
        raise error

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(type(error), match="No space left"):
        write_durably(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_appending_keeps_what_is_there(tmp_path):
    append_durably(tmp_path / "a", "one\n")
    append_durably(tmp_path / "a", "two\n")
    assert (tmp_path / "a").read_text() == "one\ntwo\n"


@pytest.mark.parametrize(("code", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_directories_is_no_error(tmp_path, monkeypatch, code, fails):
    def refuse(handle):
        raise OSError(code, "refused")

    monkeypatch.setattr(os, "fsync", refuse)
    if fails:
        with pytest.raises(OSError, match="refused"):
            sync(tmp_path)
    else:
        sync(tmp_path)


def test_what_a_killed_writer_left_is_removed_after_a_day(tmp_path):
    old, new, own = (tmp_path / f".partial-{name}" for name in ("0123abcd.npz", "4567abcd.npz", "downloads"))
    for path in (old, new, own):
        path.touch()
    for path in (old, own):
        os.utime(path, times=(time.time(), time.time() - 25 * 3600))
    remove_abandoned(tmp_path)
    assert {*tmp_path.iterdir()} == {new, own}
