"""What is known of single files, read by several threads and kept until a file changes; above all pictures' sizes.

Which files there are is the business of the sources.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from cascade_train.data.decoding.decode import upright_size
from cascade_train.data.index.cache import default_cache_dir, read_cache, write_cache
from cascade_train.data.index.rows import Index
from cascade_train.data.sample import UnreadableSampleError, most_unreadable, too_many_text
from cascade_train.errors import RunError

EXTENSIONS = ("jpg", "jpeg", "jfif", "png", "webp", "bmp")
"""Of files that count as pictures, in any case."""

THREADS = 16
"""Readers of headers: one waits for the disk or the network while another decodes."""

_FORMAT = 1
_HEADER_BYTES = 64 * 1024
_LONGEST_HEADER_BYTES = 128 * 1024**2
_BLOCK = 256  # files that a thread takes at once
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of files.

    Attributes:
        size: (N,) int64 bytes of each; -1 = there is no such file, or it is a folder.
        values: (N, K) int32, what was read from each; 0 where there is no such file.
    """

    size: np.ndarray
    values: np.ndarray


def picture_size(path: Path) -> tuple[int, int]:
    """Return (width, height) of a picture as it is seen, (0, 0) if its header cannot be read."""
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
        for more in (False, True):  # large metadata may come before the size; webp wants the whole file
            try:
                return upright_size(head + file.read(_LONGEST_HEADER_BYTES) if more else head)
            except UnreadableSampleError:
                continue
    return 0, 0


def load_picture_sizes(owner: Path, root: Path, names: Sequence[str], cache_dir: Path | None) -> Facts:
    """Return (width, height) of pictures below a folder, in the order of their names. See `load_facts`."""
    return load_facts(owner, root, names, picture_size, columns=2, kind="sizes", cache_dir=cache_dir)


def load_facts(
    owner: Path,
    root: Path,
    names: Sequence[str],
    read: Callable[[Path], Sequence[int]],
    *,
    columns: int,
    kind: str,
    cache_dir: Path | None,
) -> Facts:
    """Return facts of files, from the cache for each one that has the same size and time of change.

    Args:
        owner: the folder or table that names the files; the cache is its own.
        root: folder that the names are relative to.
        names: of the files, any of which may be missing.
        read: returns the facts of one file; called by several threads.
        columns: how many facts a file has.
        kind: what is read, and by which settings: another kind is kept in another file.
        cache_dir: where the cache lies; None = beside `owner` if that can be written, else the user's cache folder.

    Raises:
        ConfigError: `cache_dir` cannot be written.
        OSError: a file is there and cannot be read.
    """
    each = list(dict.fromkeys(names))  # a table may name a picture many times
    facts = _load_facts(owner, root, each, read, columns=columns, kind=kind, cache_dir=cache_dir)
    place = {name: number for number, name in enumerate(each)}
    rows = np.array([place[name] for name in names], dtype=np.int64)
    return Facts(size=facts.size[rows], values=facts.values[rows])


def refuse_unreadable(index: Index, where: str, share: float) -> None:
    """Check that nearly all pictures have a header that tells their size.

    Args:
        index: of the samples.
        where: the key and value that names them, for the message.
        share: of the samples that may have none; a few always may.

    Raises:
        RunError: more have none.
    """
    names = sorted({index.name(row) for row in np.flatnonzero(index.table["width"] == 0).tolist()})
    if len(names) > most_unreadable(len(index), share):
        listed = f"{', '.join(names[:10])}{', ...' if len(names) > 10 else ''} (no header that tells the size)"
        raise RunError(f"{where}: {too_many_text(len(names), len(index), share, listed)}")


def _load_facts(
    owner: Path,
    root: Path,
    names: Sequence[str],
    read: Callable[[Path], Sequence[int]],
    *,
    columns: int,
    kind: str,
    cache_dir: Path | None,
) -> Facts:
    """Do as `load_facts` for names that are all different."""
    text = f"{owner.resolve()}|{root.resolve()}|{kind}|{_FORMAT}"
    folder = default_cache_dir(owner) if cache_dir is None else cache_dir
    cached = folder / f"{owner.resolve().name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
    marks = np.array(list(_in_threads(_mark, [root / name for name in names])), dtype=np.int64).reshape(-1, 2)
    keys = [name.encode(errors="replace") for name in names]
    values = np.zeros((len(names), columns), dtype=np.int32)
    known = _take_known(read_cache(cached), keys, marks, values)
    wanted = np.flatnonzero(~known & (marks[:, 0] >= 0))
    if len(wanted):
        _log.info("Reading the %s of %d files of %s; they are kept in %s.", kind, len(wanted), owner, folder)
        values[wanted] = list(_in_threads(read, [root / names[row] for row in wanted.tolist()]))
        write_cache(cached, {"keys": np.array(keys), "marks": marks, "values": values}, required=cache_dir is not None)
    return Facts(size=marks[:, 0], values=values)


def _mark(path: Path) -> tuple[int, int]:
    """Return size and time of change in nanoseconds, which change when a file is written; -1 where there is none."""
    try:
        found = path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return -1, 0
        raise
    except ValueError:  # a name that no file can have
        return -1, 0
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else (-1, 0)


def _take_known(
    kept: dict[str, np.ndarray] | None, keys: list[bytes], marks: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Fill in the values of files that are unchanged since they were kept, and return which those are, (N,) bool."""
    known = np.zeros(len(keys), dtype=bool)
    if kept is None or not kept.keys() >= {"keys", "marks", "values"} or kept["values"].shape[1:] != values.shape[1:]:
        return known
    row_of = {key: row for row, key in enumerate(kept["keys"].tolist())}
    rows = np.array([row_of.get(key, -1) for key in keys], dtype=np.int64)
    there = rows >= 0
    known[there] = (kept["marks"][rows[there]] == marks[there]).all(axis=1)
    values[known] = kept["values"][rows[known]]
    return known


def _in_threads(read: Callable[[Path], T], paths: Sequence[Path]) -> Iterator[T]:
    blocks = [paths[start : start + _BLOCK] for start in range(0, len(paths), _BLOCK)]
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        yield from itertools.chain.from_iterable(pool.map(lambda block: [read(path) for path in block], blocks))
