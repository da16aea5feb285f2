"""Arrays as long as the data, kept in files: a start maps them and reads none whole, and ranks share their pages."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.errors import ConfigError
from cascade_train.files.durable import remove_abandoned, sync
from cascade_train.files.untrusted import read_regular

_MADE = "made.json"  # name, bytes and digest of each array
_log = logging.getLogger(__name__)

Check = Callable[[Mapping[str, np.ndarray]], object]
"""Raises a ValueError where arrays do not fit together."""


class MappedArray(np.memmap):
    """An array in a file, or a contiguous part of one; a process that is sent it maps the file itself."""

    def __reduce__(self) -> Any:
        """File, place, type and shape; the content where that is not what the file holds."""
        mapping = getattr(self, "_mmap", None)  # numpy's name, which its types do not know
        if mapping is None or not self.flags.c_contiguous:
            return np.asarray(self).__reduce__()
        begin = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY  # of what is mapped
        offset = begin + self.ctypes.data - np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        return type(self), (self.filename, self.dtype, "r", offset, self.shape)


def mapped(folder: Path, write: Callable[[Path], None], check: Check = len) -> dict[str, np.ndarray]:
    """Map the arrays in a folder, by name; where it is missing or damaged, what `write` puts into an empty one.

    It is damaged where a size differs, or `check` raises a ValueError; see `changed_arrays` for the content. Of several
    processes one writes while the others wait, where the file system has locks. A kill leaves the folder whole or
    without its name. An OSError where it cannot be written.
    """
    arrays = _read(folder, check, logging.DEBUG)
    if arrays is None:
        with one_at_a_time(folder.with_suffix(".lock")):
            arrays = _read(folder, check, logging.WARNING)
            if arrays is None:
                arrays = _written(folder, write, check)
    return arrays


def changed_arrays(folder: Path) -> list[Path]:
    """Files of a folder whose content is not what was written; every byte is read."""
    if not folder.is_dir():
        return []
    try:
        made = _read_made(folder)
        return [file for file, (size, digest) in made.items() if file.stat().st_size != size or _digest(file) != digest]
    except (ConfigError, OSError, ValueError) as error:
        _log.warning("cached index %s is damaged (%s)", folder, error)
        return [folder / _MADE]


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


def _read_made(folder: Path) -> dict[Path, tuple[int, str]]:
    made = json.loads(read_regular(folder / _MADE, limit=2**20))
    return {folder / f"{name}.npy": (size, digest) for name, (size, digest) in made.items()}


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()[:32]


def _read(folder: Path, check: Check, level: int) -> dict[str, np.ndarray] | None:
    """Map the arrays of a folder; None where there is none, or a file of it is missing or damaged."""
    if not folder.is_dir():
        return None
    try:
        files = _read_made(folder)
        if cut := [file.name for file, (size, _) in files.items() if not file.is_file() or file.stat().st_size != size]:
            raise ValueError(f"{', '.join(cut)} is missing or cut")
        arrays = {file.stem: np.load(file, mmap_mode="r", allow_pickle=False).view(MappedArray) for file in files}
        check(arrays)
        return arrays
    except (ConfigError, OSError, ValueError, TypeError, AttributeError, EOFError) as error:
        _log.log(level, "cached index %s is damaged (%s); it is made anew", folder, error)
        return None


def _written(folder: Path, write: Callable[[Path], None], check: Check) -> dict[str, np.ndarray]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent)
    partial = folder.with_name(f".partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        write(partial)
        made = {path.stem: (path.stat().st_size, _digest(path)) for path in sorted(partial.iterdir())}
        (partial / _MADE).write_text(json.dumps(made), encoding="utf-8")
        for path in partial.iterdir():  # a mapped file whose content did not reach the disk is not noticed
            sync(path)
        if _read(folder, check, logging.DEBUG) is None:  # no process of another machine was quicker
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    arrays = _read(folder, check, logging.WARNING)
    if arrays is None:
        raise OSError(f"{folder} cannot be read after it was written")
    return arrays
