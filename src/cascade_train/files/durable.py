"""Files that survive a crash: written beside, synced to the disk, renamed.

No knowledge of what the files mean may live here.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Answers of file systems that cannot sync a directory; they keep names in order by other means."""


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable.

    Raises:
        OSError: the disk failed.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(handle)


def write_durably(path: Path, text: str) -> None:
    """Replace the file at `path` by `text` (UTF-8) in one step: a crash leaves the old file or the new one.

    Raises:
        OSError: the disk is full or failed, or the directory is not writable.
    """
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:  # a signal too
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def append_durably(path: Path, text: str) -> None:
    """Add `text` (UTF-8) to the end of the file at `path`, made if it is missing, down to the disk.

    Raises:
        OSError: the disk is full or failed, or the file is not writable.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
