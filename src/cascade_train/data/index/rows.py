"""The index: one row per usable sample, in the order of the data; its split by key, and how often each row comes.

The index holds what planning needs and where a sample lies; never pixels or captions.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cascade_train.errors import ConfigError
from cascade_train.redaction import printable

LONGEST_KEY = 4096
"""Characters of a file's path, and so of a key: in memory all keys of a part are as wide as the longest."""

ROW_FIELDS = [("shard", "<i4"), ("width", "<i4"), ("height", "<i4")]


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
    content: np.ndarray = field(default=None)  # type: ignore[arg-type] # (N,) uint64, checksums; 0 = unknown, 1 = no files
    rows_are_samples: bool = True  # False where each row stands for a tar that can only be streamed

    def __post_init__(self) -> None:
        if self.content is None:
            object.__setattr__(self, "content", np.ones(len(self.table), dtype=np.uint64))

    def __len__(self) -> int:
        return len(self.table)

    def name(self, row: int) -> str:
        """Return shard and key of a row for messages: one printable line, whatever the key holds."""
        return printable(f"{self.shards[self.table['shard'][row]]}:{self.keys[row].decode(errors='surrogateescape')}")

    @functools.cached_property
    def digest(self) -> str:
        """16 hex digits that change when a sample is added, removed, moved or resized."""
        state = hashlib.sha256("\n".join(self.shards).encode())
        state.update(repr(self.table.dtype.descr).encode())
        state.update(np.ascontiguousarray(self.table).view(np.uint8).data)
        state.update(b"\n".join(self.keys.tolist()))
        return state.hexdigest()[:16]


def split(index: Index, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide the rows into training and held-out rows, two sorted int64 arrays, by a hash of the key.

    A key falls on the same side whatever else the data holds, so that adding shards moves no sample. A ConfigError
    where a side is empty, or the share is not in [0, 1).
    """
    if not 0 <= share < 1:
        raise ConfigError(f"validate.share={share} must be at least 0 and below 1: 0.01 holds out one key in a hundred")
    held_out = _hashes(index.keys.tolist()) < np.uint64(share * 2**64)
    train, held = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    if len(train) == 0 or (share > 0 and len(held) == 0):
        raise ConfigError(
            f"validate.share={share} of {len(index)} samples leaves {len(train)} to train on and {len(held)} held out;"
            " both must be at least 1: change the share, add data, or give validate.urls"
        )
    return train, held


def repeat_counts(keys: Sequence[bytes], factor: float) -> np.ndarray:
    """Return how often each of N samples comes in an epoch, (N,) int64 with the sum round(factor * N), factor >= 0.

    Once more than int(factor), and the same ones in every epoch, come those whose keys have the smallest hashes, so
    that samples which are added later move few of the others. 0.4 thus takes the same 40 % every time.
    """
    counts = np.full(len(keys), math.floor(factor), dtype=np.int64)
    more = round(factor * len(keys)) - int(counts.sum())
    counts[np.argsort(_hashes(keys), kind="stable")[:more]] += 1
    return counts


def repeated_rows(counts: np.ndarray) -> np.ndarray:
    """Return (sum,) int64 rows, all that come at all, then all that come twice, and so on."""
    passes = range(int(counts.max(initial=0)))
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.flatnonzero(counts > number) for number in passes)])


def _hashes(keys: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in keys), dtype="<u8")
