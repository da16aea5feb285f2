"""The index: one row per usable sample, in the order of the data; its split by key, and how often each row comes.

The index has what planning needs and where a sample lies; never pixels or captions. Its checksums of the samples' files
are recorded by runs and caches, and compared when those go on. They are of size and beginning, which an index reads
anyway: where a file lies and when it was written do not count, so that a copy of the data is the same data.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import math
import mmap
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.errors import ConfigError
from cascade_train.files.durable import remove_abandoned, sync
from cascade_train.files.untrusted import read_regular
from cascade_train.redaction import printable

LONGEST_KEY = 4096
"""Characters of a file's path, and so of a key: in memory all keys of a part are as wide as the longest."""

ROW_FIELDS = [("shard", "<i4"), ("width", "<i4"), ("height", "<i4")]

ABSENT = 1
"""The checksum of a part that a sample lacks."""

BEGINNING_BYTES = 64 * 1024
_KEYS_AT_ONCE = 2**16
_BLOCKS = 64  # of an index in a record: a data set of as many samples has each of them named
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Index:
    """A table of samples."""

    shards: tuple[str, ...]  # names of the shards, in the order of the data
    table: np.ndarray
    """(N,) structured array with at least the fields of `ROW_FIELDS`, sorted by shard; width and height in pixels of
    the upright picture, 0 where the header cannot be read. A source adds its own."""
    keys: np.ndarray  # (N,) bytes, each sample's key within its shard
    filters: str = ""  # identity of the row filters that chose these samples; empty = none
    metadata: str = ""  # identity of what metadata files say of these samples; empty = none is read
    content: np.ndarray = field(default=None)  # type: ignore[arg-type] # (N,) uint64, checksums; 1 = no files
    rows_are_samples: bool = True  # False where each row stands for a tar that can only be streamed
    split_by: np.ndarray | None = None  # (N,) bytes whose hashes choose what is held out; None = the keys
    folder: Path | None = None  # where what follows from the index is kept, for large ones; None = in memory

    def __post_init__(self) -> None:
        if self.content is None:
            object.__setattr__(self, "content", np.ones(len(self.table), dtype=np.uint64))

    def __len__(self) -> int:
        return len(self.table)

    def name(self, row: int) -> str:
        """Shard and key of a row for messages: one printable line, whatever the key holds."""
        return printable(f"{self.shards[self.table['shard'][row]]}:{self.keys[row].decode(errors='surrogateescape')}")

    @functools.cached_property
    def digest(self) -> str:
        """16 hex digits that change when a sample is added, removed, moved or resized."""
        return self.kept("digest", "", lambda: {"digest": np.array(self._digest())})["digest"].item()

    @functools.cached_property
    def content_record(self) -> str:
        """What a checkpoint keeps of the content: checksums by blocks of rows."""
        return self.kept("record", "", lambda: {"record": np.array(self._content_record())})["record"].item()

    def kept(self, name: str, identity: str, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Arrays that follow from the index and from what `identity` tells, from `folder` if they are there."""
        if self.folder is None:
            return make()

        def write(folder: Path) -> None:
            for key, array in make().items():
                np.save(folder / f"{key}.npy", array)

        try:
            return mapped(self.folder / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}", write)
        except OSError as error:
            _log.warning("%s of the index is not kept, since %s cannot be written (%s)", name, self.folder, error)
            return make()

    def _digest(self) -> str:
        state = hashlib.sha256("\n".join(self.shards).encode())
        state.update(repr(self.table.dtype.descr).encode())
        state.update(np.ascontiguousarray(self.table).view(np.uint8).data)
        for start in range(0, len(self), _KEYS_AT_ONCE):
            state.update(b"\n" * (start > 0) + b"\n".join(self.keys[start : start + _KEYS_AT_ONCE].tolist()))
        return state.hexdigest()[:16]

    def _content_record(self) -> str:
        return " ".join([str(len(self)), *(self.block_digest(block) for block in _blocks(len(self)))])

    def block_digest(self, rows: slice) -> str:
        """8 hex digits that change with the key or the content of a row among consecutive ones."""
        return f"{zlib.crc32(self.content[rows].tobytes(), zlib.crc32(repr(self.keys[rows].tolist()).encode())):08x}"


def rows_digest(rows: np.ndarray) -> str:
    """16 hex digits that change with any of the rows of an index that take part."""
    return hashlib.sha256(np.ascontiguousarray(rows, dtype="<i8").data).hexdigest()[:16]


def split(index: Index, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide the rows into training and held-out rows, two sorted int64 arrays, by a hash of the key.

    A key falls on the same side whatever else the data holds, so that adding shards moves no sample. A ConfigError
    where a side is empty, or the share is not in [0, 1).
    """
    if not 0 <= share < 1:
        raise ConfigError(f"validate.share={share} must be at least 0 and below 1: 0.01 holds out one key in a hundred")
    keys = index.keys if index.split_by is None else index.split_by
    held_out = _hashes(keys.tolist()) < np.uint64(share * 2**64)
    train, held_out_rows = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    if len(train) == 0 or (share > 0 and len(held_out_rows) == 0):
        sizes = f"{len(train)} to train on and {len(held_out_rows)} held out"
        raise ConfigError(f"validate.share={share} of {len(index)} samples leaves {sizes}: change it, or add data")
    return train, held_out_rows


def repeat_counts(keys: Sequence[bytes], factor: float) -> np.ndarray:
    """How often each of N samples comes in an epoch, (N,) int64 with the sum round(factor * N), factor >= 0.

    Once more than int(factor), and the same ones in every epoch, come those whose keys have the smallest hashes, so
    that samples which are added later move few of the others. 0.4 thus takes the same 40 % every time.
    """
    counts = np.full(len(keys), math.floor(factor), dtype=np.int64)
    more = round(factor * len(keys)) - int(counts.sum())
    counts[np.argsort(_hashes(keys), kind="stable")[:more]] += 1
    return counts


def repeat_rows(counts: np.ndarray) -> np.ndarray:
    """(sum,) int64 rows, all that come at all, then all that come twice, and so on."""
    passes = range(int(counts.max(initial=0)))
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.flatnonzero(counts > number) for number in passes)])


def _hashes(keys: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in keys), dtype="<u8")


def checksum(beginning: bytes, size: int) -> int:
    """56 bits of a file's size and its first `BEGINNING_BYTES`, or all that it holds.

    No CRC-32, which is the same for all contents of a size that end in their own, as in gzip.
    """
    state = hashlib.blake2b(beginning[:BEGINNING_BYTES], digest_size=7, salt=size.to_bytes(8, "little"))
    return int.from_bytes(state.digest())


def text_checksum(value: Any) -> int:
    """56 bits of a caption or other plain values."""
    text = repr(value).encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())


def combine(*parts_N: np.ndarray) -> np.ndarray:
    """Checksums of samples, (N,) uint64, from those of their parts, (N,) each."""
    total_N = np.zeros(len(parts_N[0]), dtype=np.uint64)
    for part_N in parts_N:
        total_N = total_N * np.uint64(6364136223846793005) + part_N.astype(np.uint64)
    return total_N


def changed_content(index: Index, state: Mapping[str, Any]) -> list[str]:
    """Which samples changed since a state was saved, for messages: exactly of up to 64, else between two of them."""
    then, *digests = state["content"].split()
    blocks = zip(_blocks(int(then)), digests, strict=True)
    changed = [block for block, digest in blocks if index.block_digest(block) != digest]
    count = "" if len(index) == int(then) else f"{then} samples then, {len(index)} now, from "
    if count:  # those behind the first have moved
        changed = (changed or [slice(int(then), len(index))])[:1]
    ends = [(min(block.start, len(index) - 1), min(block.stop, len(index)) - 1) for block in changed]
    listed = first_names([" to ".join(dict.fromkeys(map(index.name, rows))) for rows in ends])
    return [f"the files behind data changed ({count}{listed}); put them back"] if listed else []


def changed_rows(index: Index, then: Index) -> np.ndarray:
    """Rows whose key or content differs from that in an index of as many rows."""
    return np.flatnonzero((index.keys != then.keys) | (index.content != then.content))


def changed_samples(index: Index, then: Index) -> str | None:
    """Samples that differ from those of an earlier index, for messages; None = none."""
    if (common := min(len(index), len(then))) < max(len(index), len(then)):
        differs = np.append(index.keys[:common] != then.keys[:common], True)
        first = (index if len(index) > common else then).name(int(differs.argmax()))
        return f"{len(then)} samples then, {len(index)} now, from {first} on"
    return first_names([index.name(row) for row in changed_rows(index, then).tolist()]) or None


def first_names(names: Iterable[str], most: int = 5) -> str:
    """First different names for a message, each printable, and how many more there are."""
    unique = list(dict.fromkeys(map(printable, names)))
    return ", ".join(unique[:most]) + (f" and {len(unique) - most} more" if len(unique) > most else "")


def _blocks(count: int) -> list[slice]:
    size = -(-count // _BLOCKS)
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]


_MADE = "made.json"  # name, bytes and digest of each array

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
        files = _read_made(folder).items()
        return [file for file, (size, digest) in files if file.stat().st_size != size or _digest(file) != digest]
    except (ConfigError, OSError, ValueError) as error:
        _log.warning("cached index %s is damaged (%s)", folder, error)
        return [folder / _MADE]


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Let one process hold a lock file while the others wait; without one, where it cannot be made."""
    with ExitStack() as stack:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(lock.open("a")), fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):  # where nothing may be removed, the empty file stays
                lock.unlink(missing_ok=True)


def _read_made(folder: Path) -> dict[Path, tuple[int, str]]:
    recorded = json.loads(read_regular(folder / _MADE, limit=2**20))
    return {folder / f"{name}.npy": (size, digest) for name, (size, digest) in recorded.items()}


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
        digests = {path.stem: (path.stat().st_size, _digest(path)) for path in sorted(partial.iterdir())}
        (partial / _MADE).write_text(json.dumps(digests), encoding="utf-8")
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
