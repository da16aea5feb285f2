"""Checksums of what samples are made of, recorded by runs and caches and compared when those go on.

A checksum is of the size and the beginning of a file, which an index reads anyway. Where a file lies and when it was
written do not count, so that a copy of the data is the same data.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from cascade_train.data.index.rows import Index

ABSENT = 1
"""The checksum of a part that a sample lacks; 0 is that of what an earlier version of the library indexed: unknown."""

BEGINNING_BYTES = 64 * 1024
_BLOCKS = 64  # of an index in a record: a data set of as many samples has each of them named
_NAMED = 5
_log = logging.getLogger(__name__)


def checksum(beginning: bytes, size: int) -> int:
    """Return 56 bits of a file's size and its first `BEGINNING_BYTES`, or all that it holds.

    No CRC-32, which is the same for all contents of a size that end in their own, as in gzip.
    """
    state = hashlib.blake2b(beginning[:BEGINNING_BYTES], digest_size=7, salt=size.to_bytes(8, "little"))
    return int.from_bytes(state.digest())


def text_checksum(value: Any) -> int:
    """Return 56 bits of a caption or other plain values."""
    text = repr(value).encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())


def combined(*parts_N: np.ndarray) -> np.ndarray:
    """Return (N,) uint64 that change where one of the checksums (N,) of a sample's parts does, 0 where one is 0."""
    total_N = np.zeros(len(parts_N[0]), dtype=np.uint64)
    for part_N in parts_N:
        total_N = total_N * np.uint64(6364136223846793005) + part_N.astype(np.uint64)
    return np.where(np.all(parts_N, axis=0), np.maximum(total_N, np.uint64(1)), np.uint64(0))


def content_record(index: Index) -> str:
    """Return what a checkpoint keeps of an index: checksums of its content by blocks of rows, 0 = unknown."""
    parts = (index.content[block] for block in _blocks(len(index)))
    return " ".join(f"{zlib.crc32(part.tobytes()):08x}" if part.all() else "0" for part in parts)


def changed_content(index: Index, state: Mapping[str, Any]) -> list[str]:
    """Return what of the content of the same samples is known to have changed since a state was saved, for messages."""
    now, blocks = content_record(index).split(), _blocks(len(index))
    then = state.get("content", "").split() or ["0"] * len(now)
    _warn_of_unknown(all_known="0" not in then + now)
    both = zip(blocks, then, now, strict=True)
    changed = [(index.name(each.start), index.name(each.stop - 1)) for each, *two in both if len({*two, "0"}) == 3]
    listed = _listed([" to ".join(dict.fromkeys(names)) for names in changed])
    return [f"the files behind data changed ({listed}); put them back"] if listed else []


def changed_rows(index: Index, then: Index) -> np.ndarray:
    """Return the rows whose key or content is another than in an index of as many rows; unknown content is none."""
    known = (index.content > 0) & (then.content > 0)
    return np.flatnonzero((index.keys != then.keys) | (known & (index.content != then.content)))


def changed_samples(index: Index, then: Index) -> str | None:
    """Return which samples differ from those of an index of before, for messages; None = none that is known."""
    if len(index) != len(then):
        return f"{len(then)} samples then, {len(index)} now"
    _warn_of_unknown(all_known=bool(index.content.all() and then.content.all()))
    return _listed([index.name(row) for row in changed_rows(index, then).tolist()])


def _warn_of_unknown(*, all_known: bool) -> None:
    if not all_known:
        _log.warning("Whether files of the data changed is unknown where an earlier version indexed or recorded them.")


def _listed(names: list[str]) -> str | None:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _NAMED} more" if len(unique) > _NAMED else ""
    return ", ".join(unique[:_NAMED]) + more if unique else None


def _blocks(count: int) -> list[slice]:
    size = -(-count // _BLOCKS)
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]
