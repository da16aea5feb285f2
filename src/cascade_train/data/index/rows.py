"""The index: one row per usable sample, in the order of the data; its split by key, and how often each row comes.

The index has what planning needs and where a sample lies; never pixels or captions. Its checksums of the samples' files
are recorded by runs and caches, and compared when those go on. They are of size and beginning, which an index reads
anyway: where a file lies and when it was written do not count, so that a copy of the data is the same data.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.data.index.mapped import mapped
from cascade_train.errors import ConfigError
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
    train, held = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    if len(train) == 0 or (share > 0 and len(held) == 0):
        raise ConfigError(
            f"validate.share={share} of {len(index)} samples leaves {len(train)} to train on and {len(held)} held out;"
            " both must be at least 1: change the share, add data, or give validate.urls"
        )
    return train, held


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
