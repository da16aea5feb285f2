"""Facts about files of data, above all sizes of pictures, read by several threads; and the cache of what was read."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from cascade_train.data.decoding.decode import END_BYTES, upright_size
from cascade_train.data.index.rows import ABSENT, BEGINNING_BYTES, checksum
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.errors import ConfigError
from cascade_train.files.durable import remove_abandoned, replacing
from cascade_train.files.untrusted import open_regular

THREADS = 16
"""Readers of headers: one waits for the disk or the network while another decodes."""

_FORMAT = 1
_LONGEST_HEADER_BYTES = 128 * 1024**2
_BLOCK = 256  # files that a thread takes at once
_clean = functools.cache(remove_abandoned)  # once: the folder may have an index of each of many tars
_log = logging.getLogger(__name__)
P = TypeVar("P")
T = TypeVar("T")


def default_cache_dir(path: Path) -> Path:
    """`.cascade_train_index` beside a file or folder if that can be written, else the user's cache folder."""
    beside = path.resolve().parent / ".cascade_train_index"
    if os.access(beside if beside.is_dir() else beside.parent, os.W_OK):
        return beside
    return user_cache_dir()


def user_cache_dir() -> Path:
    """The user's cache folder for indexes, for data that has no folder to keep one beside."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cascade_train" / "index"


def cache_file(folder: Path, name: str, identity: str) -> Path:
    """File of what is cached under a text that changes with its content."""
    return folder / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.npz"


def read_cache(cached: Path) -> dict[str, np.ndarray] | None:
    """Arrays of a file; None if there is none, or it is damaged or may not be read."""
    try:
        with open_regular(cached) as file, np.load(file, allow_pickle=False) as parts:
            return dict(parts)
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy and zipfile answer damage in many ways
        _log.warning("cached index %s is damaged or may not be read (%s); reading the data again", cached, error)
        return None


def write_cache(cached: Path, parts: Mapping[str, np.ndarray], *, required: bool) -> None:
    """Write arrays; processes may race. A ConfigError where they are required and cannot be written."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        _clean(cached.parent)
        with replacing(cached, racing=True, durable=False) as partial:
            np.savez(partial, **parts)  # type: ignore[arg-type] # numpy has a keyword of its own
    except OSError as error:
        if required:
            raise ConfigError(f"data.index_dir={cached.parent} cannot be written ({error}); choose another") from error
        _log.warning("the index of %s is not kept, since %s cannot be written (%s)", cached.stem, cached.parent, error)


def picture_facts(path: Path) -> tuple[int, int, int]:
    """`header_facts` of a picture in a file."""
    size = path.stat().st_size
    with path.open("rb") as file:

        def read(start: int, count: int) -> bytes:
            file.seek(start)
            return file.read(count)

        return header_facts(read, size)


def header_facts(read: Callable[[int, int], bytes], size: int) -> tuple[int, int, int]:
    """Width, height and checksum of a picture, 0 x 0 without a header.

    `read(start, size)` is called with ever later positions: large metadata may come before the size, webp needs the
    whole file, and the orientation of a PNG may stand in its end.
    """
    content = b""
    for limit in (BEGINNING_BYTES, _LONGEST_HEADER_BYTES):
        content += read(len(content), limit - len(content))
        read_end = partial(read, max(limit, size - END_BYTES), END_BYTES) if limit < size else None
        with contextlib.suppress(UnreadableSampleError):
            return *upright_size(content, read_end), checksum(content, size)
    return 0, 0, checksum(content, size)


def load_picture_facts(
    owner: Path, root: Path, names: Sequence[str], cache_dir: Path | None
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and `header_facts` of pictures below a folder, in the order of their names. See `load_facts`."""
    return load_facts(owner, root, names, picture_facts, columns=3, kind="sizes", cache_dir=cache_dir)


def load_checksums(owner: Path, root: Path, names: Sequence[str], cache_dir: Path | None) -> np.ndarray:
    """Checksums of other files of samples, (N,) int64. See `load_facts`."""

    def read(path: Path) -> tuple[int]:
        with path.open("rb") as file:
            return (checksum(file.read(BEGINNING_BYTES), path.stat().st_size),)

    file_bytes, facts = load_facts(owner, root, names, read, columns=1, kind="checksums", cache_dir=cache_dir)
    return np.where(file_bytes < 0, ABSENT, facts[:, 0])


def load_facts(
    owner: Path,
    root: Path,
    names: Sequence[str],
    read: Callable[[Path], Sequence[int]],
    *,
    columns: int,
    kind: str,
    cache_dir: Path | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Facts of files, from the cache for each one that has the same size and modification time.

    `owner` has a cache for each `kind` of facts, in `cache_dir`; None = beside it, else in the user's cache folder.
    Files, named below `root`, may be missing or repeat. Returns (N,) int64 bytes, -1 = no file, and (N, columns) int64
    facts, 0 = no file.
    """
    row_of = {name: row for row, name in enumerate(dict.fromkeys(names))}
    text = f"{owner.resolve()}|{root.resolve()}|{kind}|{_FORMAT}"
    folder = default_cache_dir(owner) if cache_dir is None else cache_dir
    cached = cache_file(folder, owner.resolve().name, text)
    paths = [os.path.join(root, name) for name in row_of]  # noqa: PTH118 # a third of the time of a Path
    marks = np.array(list(_in_threads(_mark, paths)), dtype=np.int64).reshape(-1, 2)
    keys = [name.encode(errors="replace") for name in row_of]
    values = np.zeros((len(paths), columns), dtype=np.int64)
    known = _take_known(read_cache(cached), keys, marks, values)
    wanted = np.flatnonzero(~known & (marks[:, 0] >= 0))
    if len(wanted):
        _log.info("Reading the %s of %d files of %s; they are cached in %s.", kind, len(wanted), owner, folder)
        values[wanted] = list(_in_threads(read, [Path(paths[row]) for row in wanted.tolist()]))
        write_cache(cached, {"keys": np.array(keys), "marks": marks, "values": values}, required=cache_dir is not None)
    rows = np.array([row_of[name] for name in names], dtype=np.int64)
    return marks[rows, 0], values[rows]


def _mark(path: str) -> tuple[int, int]:
    """Size and modification time in nanoseconds, -1 and 0 where there is no file."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return -1, 0
        raise
    except ValueError:  # a name that no file can have
        return -1, 0
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else (-1, 0)


def _take_known(
    kept: dict[str, np.ndarray] | None, keys: list[bytes], marks: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Fill in the values of files that are unchanged since they were cached, and return which those are, (N,) bool."""
    known = np.zeros(len(keys), dtype=bool)
    if kept is None or not kept.keys() >= {"keys", "marks", "values"} or kept["values"].shape[1:] != values.shape[1:]:
        return known
    row_of = {key: row for row, key in enumerate(kept["keys"].tolist())}
    rows = np.array([row_of.get(key, -1) for key in keys], dtype=np.int64)
    there = rows >= 0
    known[there] = (kept["marks"][rows[there]] == marks[there]).all(axis=1)
    values[known] = kept["values"][rows[known]]
    return known


def _in_threads(read: Callable[[P], T], paths: Sequence[P]) -> Iterator[T]:
    blocks = [paths[start : start + _BLOCK] for start in range(0, len(paths), _BLOCK)]
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        yield from itertools.chain.from_iterable(pool.map(lambda block: [read(path) for path in block], blocks))
