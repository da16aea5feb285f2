"""Several opened sources as one index. How often each sample comes is decided by whoever joins them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cascade_train.data.captions import Captions
from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.data.sample import RawSample
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """One of the joined sources.

    Attributes:
        source: opened.
        index: what its `open` returned.
        rows: (N,) int64 rows of the index, in the order in which they are laid out, repeated ones included.
        prefix: of its keys in the joined index.
        weight: that its samples' losses are multiplied with.
    """

    source: Source
    index: Index
    rows: np.ndarray
    prefix: str = ""
    weight: float = 1.0


class Joined:
    """Sources laid out in blocks, of which each holds an equal part of every source.

    Args:
        parts: what is joined.
        name: of the whole, for messages.
        blocks: how many; they are the shards of the joined index, so that a plan that mixes some of them meets every
            source, and keeps what lies close together in a source close together.

    Raises:
        ConfigError: one of them is streamed.

    Attributes:
        index: of all rows; a sample that comes twice is two rows of one name, wherever they lie.
    """

    def __init__(self, parts: Sequence[Part], name: str, blocks: int = 1) -> None:
        if not all(part.index.rows_are_samples for part in parts):
            raise ConfigError("data: streams cannot be mixed with other samples: give tars that can be indexed")
        self._parts = parts
        cuts = [np.linspace(0, len(part.rows), blocks + 1).round().astype(np.int64) for part in parts]
        numbers = np.arange(len(parts))
        sizes = np.array([np.diff(cut) for cut in cuts]).T  # (blocks, parts)
        self._part = np.repeat(np.tile(numbers, blocks), sizes.ravel())
        spans = [part.rows[cut[b] : cut[b + 1]] for b in range(blocks) for part, cut in zip(parts, cuts, strict=True)]
        self._row = np.concatenate(spans)
        self.index = self._indexed(name, np.repeat(np.arange(blocks), sizes.sum(axis=1)), blocks)

    def _indexed(self, name: str, shard: np.ndarray, blocks: int) -> Index:
        table = np.zeros(len(self._row), dtype=ROW_FIELDS)
        table["shard"] = shard
        keys = np.empty(len(self._row), dtype=object)
        for number, part in enumerate(self._parts):
            here = self._part == number
            rows = self._row[here]
            for field in ("width", "height"):
                table[field][here] = part.index.table[field][rows]
            names = {row: f"{part.prefix}{part.index.name(row)}".encode() for row in np.unique(rows).tolist()}
            keys[here] = [names[row] for row in rows.tolist()]
        filters = " ".join(part.index.filters for part in self._parts if part.index.filters)
        return Index(shards=(name,) * blocks, table=table, keys=np.array(keys.tolist()), filters=filters)

    def read(self, row: int) -> RawSample:
        """Read one row from the source that it belongs to."""
        part, own_row = self._place(row)
        raw = part.source.read(own_row)
        return raw if part.weight == 1.0 else replace(raw, weight=part.weight * raw.weight)

    def captions_of(self, row: int) -> Captions:
        """Return what makes the captions of the source that a row belongs to."""
        part, own_row = self._place(row)
        return part.source.captions_of(own_row)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Let each source begin to read those of the rows that are its own."""
        for number, part in enumerate(self._parts):
            own = [int(self._row[row]) for row in rows if self._part[row] == number]
            if own:
                part.source.prefetch(own)

    def record(self) -> None:
        """Let each source write down what a resumed run must find again."""
        for part in self._parts:
            part.source.record()

    def _place(self, row: int) -> tuple[Part, int]:
        return self._parts[self._part[row]], int(self._row[row])


@dataclass(kw_only=True)
class JoinedSource(Source):
    """Base of the sources that join others: `open` sets `_joined`, and each row is its own source's business."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._joined: Joined

    def read(self, row: int) -> RawSample:
        """Read one row from the source that it belongs to."""
        return self._joined.read(row)

    def captions_of(self, row: int) -> Captions:
        """Return what makes the captions of the source that a row belongs to."""
        return self._joined.captions_of(row)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Let each source begin to read its own rows."""
        self._joined.prefetch(rows)

    def record(self) -> None:
        """Let each source write down what a resumed run must find again."""
        self._joined.record()


def check_parts(whole: Source, parts: Mapping[str, Source]) -> None:
    """Check that what belongs to the parts is not set for the whole, and the other way round.

    Args:
        whole: the source that joins others.
        parts: the others by their keys.

    Raises:
        ValueError: captions of the whole, or parts that are caches or have pictures of another size.
    """
    if not whole.captions.changes_nothing:
        keys = ", ".join(f"data.{key}.captions" for key in parts)
        raise ValueError(f"data.captions belongs to each of the joined sources here: set {keys}")
    for key, part in parts.items():
        if part.is_cache:
            raise ValueError(
                f"data.{key}: a cache cannot be joined with other data, since it holds no pictures. Join the data that "
                "it was made of, and make a cache of the whole."
            )
        if part.image_size != whole.image_size:
            raise ValueError(
                f"data.{key}.image_size={part.image_size} differs from data.image_size={whole.image_size}: "
                "both follow model.image_size, leave them out"
            )
