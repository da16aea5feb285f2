"""One live process per run directory: a lock that ends with its process, however that ends.

What a run directory holds and who may continue it is decided by `run_directory`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Any

from cascade_train.errors import ConfigError

log = logging.getLogger(__name__)

LOCK_NAME = ".lock"


class RunLock:
    """An exclusive lock on `<directory>/.lock`, which names its holder. Not inherited by forks; pickles as not held."""

    def __init__(self, directory: Path) -> None:
        """Store; touches no file."""
        self._directory = directory
        self._handle: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_directory": self._directory, "_handle": None}

    def acquire(self) -> None:
        """Take the lock, at once or not at all.

        A file system without locks is used without, and that is said.

        Raises:
            ConfigError: another process holds it, or the directory is not writable.
        """
        path = self._directory / LOCK_NAME
        while True:
            handle = self._open(path)
            if not self._lock(handle):
                os.close(handle)
                return
            if _is_file(handle, path):
                break
            os.close(handle)  # its holder removed the file in between: this lock is on nothing
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._handle = handle

    def release(self) -> None:
        """Give the lock back and remove its file, which locks nothing where it stays; nothing where it is not held."""
        if self._handle is not None:
            with contextlib.suppress(OSError):  # the folder may not be writable any more, which is why the run ends
                (self._directory / LOCK_NAME).unlink()
            os.close(self._handle)
            self._handle = None

    def _open(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"run.dir={self._directory} cannot be locked: {error.strerror}. Remedy: make it writable, or another "
                "run.dir"
            ) from error

    def _lock(self, handle: int) -> bool:
        """Return whether the lock is held now; False where the file system has none."""
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
            os.close(handle)
            raise ConfigError(
                f"run.dir={self._directory} is in use by {holder}: two at once would overwrite each other's results. "
                "Remedy: wait for it or stop it, or another run.name (or run.dir)"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked (%s): start no second run in it", self._directory, error.strerror)
            return False
        return True


def _is_file(handle: int, path: Path) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
