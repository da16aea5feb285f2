"""One live process per run directory."""

import errno
import fcntl
import os
import pickle
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from cascade_train.engine.run.lock import RunLock
from cascade_train.errors import ConfigError

HOLD = """
import sys, time
from pathlib import Path
from cascade_train.engine.run.lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def holding(folder):
    """Yield another process that holds the lock of a folder, without having imported torch."""
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture
def holder(tmp_path):
    with holding(tmp_path) as process:
        yield process


def test_a_directory_in_use_is_refused_and_its_holder_named(tmp_path, holder):
    with pytest.raises(ConfigError, match=rf"is in use by process {holder.pid} on .*another run\.name"):
        RunLock(tmp_path).acquire()


def test_a_killed_process_holds_nothing(tmp_path, holder):
    holder.kill()
    holder.wait()
    lock = RunLock(tmp_path)
    lock.acquire()
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_in_a_folder_that_is_not_writable_any_more_is_given_back(tmp_path, monkeypatch):
    lock = RunLock(tmp_path)
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        lock.release()
    assert (tmp_path / ".lock").is_file()
    lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def refuse(path, **_):
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_a_lock_that_travels_to_another_rank_is_not_held_there(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    pickle.loads(pickle.dumps(lock)).release()
    assert (tmp_path / ".lock").is_file()
    lock.release()


def test_a_lock_file_that_its_holder_just_removed_is_made_anew(tmp_path, monkeypatch):
    lockf, calls = fcntl.lockf, []

    def removed_in_between(handle, how):
        if not calls:
            (tmp_path / ".lock").unlink()
        calls.append(how)
        lockf(handle, how)

    monkeypatch.setattr(fcntl, "lockf", removed_in_between)
    lock = RunLock(tmp_path)
    lock.acquire()
    assert len(calls) == 2
    assert (tmp_path / ".lock").is_file()
    lock.release()


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def unsupported(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    lock = RunLock(tmp_path)
    lock.acquire()
    assert "cannot be locked (No locks available): start no second one in it" in caplog.text
    lock.release()
