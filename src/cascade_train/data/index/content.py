"""Checksums of what samples are made of, recorded by runs and caches and compared when those go on.

A checksum is of the size and the beginning of a file, which an index reads anyway. Where a file lies and when it was
written do not count, so that a copy of the data is the same data.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from cascade_train.data.index.rows import Index

BEGINNING_BYTES = 64 * 1024
_BLOCKS = 64  # of an index in a record: a data set of as many samples has each of them named
_NAMED = 5


def checksum(beginning: bytes, size: int) -> int:
    """Return 32 bits of a file's size and its first `BEGINNING_BYTES`, or all that it holds."""
    return zlib.crc32(beginning[:BEGINNING_BYTES], zlib.crc32(size.to_bytes(8, "little")))


def text_checksum(value: Any) -> int:
    """Return 32 bits of a caption or other plain values."""
    return zlib.crc32(repr(value).encode(errors="replace"))


def combined(*parts_N: np.ndarray) -> np.ndarray:
    """Return (N,) uint64 that change where one of the checksums (N,) of a sample's parts does; never 0, unknown."""
    total_N = np.zeros(len(parts_N[0]), dtype=np.uint64)
    for part_N in parts_N:
        total_N = total_N * np.uint64(6364136223846793005) + part_N.astype(np.uint64)
    return np.maximum(total_N, np.uint64(1))


def content_record(index: Index) -> dict[str, Any]:
    """Return what a checkpoint keeps of an index: checksums of keys and content by blocks of rows; under 1 kB."""
    parts = [b"\n".join(index.keys[block].tolist()) + index.content[block].tobytes() for block in _blocks(len(index))]
    return {"samples": len(index), "blocks": " ".join(f"{zlib.crc32(part):08x}" for part in parts)}


def changed_blocks(index: Index, saved: Mapping[str, Any]) -> str | None:
    """Return which samples differ from those of a record, for messages; None = none, or that is unknown."""
    if saved["samples"] != len(index):
        return f"{saved['samples']} {'samples' if index.rows_are_samples else 'tars'} then, {len(index)} now"
    pairs = zip(_blocks(len(index)), saved["blocks"].split(), content_record(index)["blocks"].split(), strict=False)
    changed = [(index.name(block.start), index.name(block.stop - 1)) for block, then, now in pairs if then != now]
    return _listed([" to ".join(dict.fromkeys(names)) for names in changed])


def changed_rows(index: Index, then: Index) -> np.ndarray:
    """Return the rows whose key or content is another than in an index of as many rows; unknown content is none."""
    known = (index.content > 0) & (then.content > 0)
    return np.flatnonzero((index.keys != then.keys) | (known & (index.content != then.content)))


def changed_samples(index: Index, then: Index) -> str | None:
    """Return which samples differ from those of an index of before, for messages; None = none, or that is unknown."""
    if len(index) != len(then):
        return f"{len(then)} samples then, {len(index)} now"
    return _listed([index.name(row) for row in changed_rows(index, then).tolist()])


def _listed(names: list[str]) -> str | None:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _NAMED} more" if len(unique) > _NAMED else ""
    return ", ".join(unique[:_NAMED]) + more if unique else None


def _blocks(count: int) -> list[slice]:
    size = -(-count // _BLOCKS)
    return [slice(start, min(count, start + size)) for start in range(0, count, size)]
