"""Access to a folder: whether it may become a run's, and a lock held by one live process. Imported before torch."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from cascade_train.errors import ConfigError

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
"""The file that makes a folder a run's."""

LOCK_NAME = ".lock"


def check_folder(directory: Path) -> None:
    """Refuse (ConfigError) a folder that is not a run's and cannot be made one; leaves nothing behind."""
    if (directory / CONFIG).is_file():
        return
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(
            f"run.dir={directory} exists, is not empty and is not a run (it has no {CONFIG}). "
            "Remedy: another run.name or run.dir, or move it away"
        )
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise not_writable(directory, error) from error


def not_writable(directory: Path, error: OSError) -> ConfigError:
    """Refusal of a folder that cannot be made."""
    return ConfigError(f"run.dir={directory} cannot be made: {error.strerror or error}. Remedy: a writable run.dir")


class RunLock:
    """An exclusive lock on `<directory>/.lock`, which names its holder, and ends with its process, however that ends.

    A POSIX record lock: it works over NFS and, unlike `flock`, is not inherited by forked data workers, which may
    outlive a killed run. Pickles as not held. `key` names the folder in messages, `other` the key of another.
    """

    def __init__(self, directory: Path, *, key: str = "run.dir", other: str = "run.name (or run.dir)") -> None:
        self._directory = directory
        self._key, self._other = key, other
        self._handle: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}

    def acquire(self) -> None:
        """Take the lock without waiting, or refuse (ConfigError); a file system without locks only gets a warning."""
        path = self._directory / LOCK_NAME
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{self._key}={self._directory} cannot be locked: {error.strerror}. Remedy: make it writable, or "
                f"another {self._key}"
            ) from error
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
            os.close(handle)
            raise ConfigError(
                f"{self._key}={self._directory} is in use by {holder}: two at once would overwrite each other's "
                f"results. Remedy: wait for it or stop it, or another {self._other}"
            ) from error
        except OSError as error:
            log.warning("%s cannot be locked (%s): start no second one in it", self._directory, error.strerror)
            os.close(handle)
            return
        try:
            is_current = os.path.samestat(os.fstat(handle), path.stat())
        except FileNotFoundError:
            is_current = False
        if not is_current:
            os.close(handle)  # its holder removed the file in between: this lock is on nothing
            return self.acquire()
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._handle = handle

    def release(self) -> None:
        """Release the lock, if it is held, and remove its file; a file that stays locks nothing."""
        if self._handle is not None:
            with contextlib.suppress(OSError):  # the folder may not be writable any more, which is why the run ends
                (self._directory / LOCK_NAME).unlink()
            os.close(self._handle)
            self._handle = None
