"""Files that survive a crash."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from cascade_train.errors import Interrupted
from cascade_train.files.durable import append_durably, remove_abandoned, replacing, sync, write_durably


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


def test_what_a_killed_writer_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path):
    code = "import os, sys; from cascade_train.files.durable import replacing as r; from pathlib import Path\n"
    code += "with r(Path(sys.argv[1]), racing=True) as beside: beside.write_text('half'); os.kill(os.getpid(), 9)"
    for name in ("a.npz", "b.tar"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=False)
    with replacing(tmp_path / "c.npz", racing=True) as live, replacing(tmp_path / "d.npz") as other:
        live.write_text("whole")
        assert len(list(tmp_path.iterdir())) == 4
        remove_abandoned(tmp_path)
        assert set(tmp_path.iterdir()) == {live, other}
    assert (tmp_path / "c.npz").read_text() == "whole"


def test_a_file_that_was_taken_for_abandoned_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    lock, taken = fcntl.flock, []

    def late(handle, operation):
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].unlink()
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with replacing(tmp_path / "a.npz", racing=True) as beside:
        remove_abandoned(tmp_path)
        assert beside.exists()
    assert taken == [beside]
