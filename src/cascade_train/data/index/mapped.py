"""Arrays as long as the data, kept in files: a start maps them and reads none whole, and ranks share their pages."""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.errors import ConfigError
from cascade_train.files.durable import remove_abandoned, sync
from cascade_train.files.untrusted import read_regular

_SIZES = "sizes.json"
_log = logging.getLogger(__name__)


class MappedArray(np.memmap):
    """An array in a file, or a contiguous part of one; a process that is sent it maps the file itself."""

    def __reduce__(self) -> Any:
        """Return file, place, type and shape; the content where that is not what the file holds."""
        mapping = getattr(self, "_mmap", None)  # numpy's name, which its types do not know
        if mapping is None or not self.flags.c_contiguous:
            return np.asarray(self).__reduce__()
        begin = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY  # of what is mapped
        offset = begin + self.ctypes.data - np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        return type(self), (self.filename, self.dtype, "r", offset, self.shape)


def mapped(folder: Path, write: Callable[[Path], None]) -> dict[str, np.ndarray]:
    """Return the arrays in a folder, by name; where it is missing or damaged, what `write` puts into an empty one.

    Of several processes one writes while the others wait, where the file system has locks. A kill leaves the folder
    whole or without its name. An OSError where it cannot be written.
    """
    found = _read(folder, logging.DEBUG)
    if found is None:
        with one_at_a_time(folder.with_suffix(".lock")):
            found = _read(folder, logging.WARNING)
            if found is None:
                found = _written(folder, write)
    return found


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Let one process hold a lock file while the others wait; without one, where it cannot be made."""
    with ExitStack() as held:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(lock.open("a")), fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):  # where nothing may be removed, the empty file stays
                lock.unlink(missing_ok=True)


def _read(folder: Path, level: int) -> dict[str, np.ndarray] | None:
    """Map the arrays of a folder; None where there is none, or a file of it is missing or damaged."""
    if not folder.is_dir():
        return None
    try:
        sizes = json.loads(read_regular(folder / _SIZES, limit=2**20))
        files = {folder / f"{name}.npy": size for name, size in sizes.items()}
        if cut := [file.name for file, size in files.items() if not file.is_file() or file.stat().st_size != size]:
            raise ValueError(f"{', '.join(cut)} is missing or cut")
        return {file.stem: np.load(file, mmap_mode="r", allow_pickle=False).view(MappedArray) for file in files}
    except (ConfigError, OSError, ValueError, AttributeError, EOFError) as error:
        _log.log(level, "cached index %s is damaged (%s); it is made anew", folder, error)
        return None


def _written(folder: Path, write: Callable[[Path], None]) -> dict[str, np.ndarray]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent)
    partial = folder.with_name(f".partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        write(partial)
        sizes = {path.stem: path.stat().st_size for path in sorted(partial.iterdir())}
        (partial / _SIZES).write_text(json.dumps(sizes), encoding="utf-8")
        for path in partial.iterdir():  # a mapped file whose content did not reach the disk is not noticed
            sync(path)
        if _read(folder, logging.DEBUG) is None:  # no process of another machine was quicker
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    found = _read(folder, logging.WARNING)
    if found is None:
        raise OSError(f"{folder} cannot be read after it was written")
    return found
