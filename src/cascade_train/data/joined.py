"""The base of the sources that join others as one. How often each sample comes is decided by the source."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cascade_train.data.captions import Captions
from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.data.index.selection import selected
from cascade_train.data.sample import RawSample
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """One of the joined sources."""

    source: Source  # opened
    index: Index  # what its `open` returned
    rows: np.ndarray  # (N,) int64 rows of the index, in the order in which they are laid out, repeated ones included
    prefix: str = ""  # of its keys in the joined index
    weight: float = 1.0  # of its samples' losses

    @classmethod
    def opened(cls, source: Source) -> Part:
        """Open a source, with the rows that its selectors keep."""
        index = source.open()
        return cls(source=source, index=index, rows=np.flatnonzero(selected(index, source.selectors())))


@dataclass(kw_only=True)
class JoinedSource(Source):
    """Sources laid out in blocks, each of which holds an equal part of every source.

    `open` calls `_join`; a row is then read, captioned and prefetched by its own source.
    """

    @abc.abstractmethod
    def joined(self) -> Mapping[str, Source]:
        """Return the sources by their keys below `data`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parts: Sequence[Part] = ()
        if self.captions != Captions():
            keys = ", ".join(f"data.{key}.captions" for key in self.joined())
            raise ValueError(f"data.captions belongs to each of the joined sources here: set {keys}")
        for key, part in self.joined().items():
            if part.is_cache:
                raise ValueError(
                    f"data.{key}: a cache cannot be joined with other data, since it holds no pictures. Join the data"
                    " that it was made of, and make a cache of the whole."
                )
            if part.image_size != self.image_size:
                raise ValueError(
                    f"data.{key}.image_size={part.image_size} differs from data.image_size={self.image_size}: "
                    "both follow model.image_size, leave them out"
                )

    def check(self) -> None:
        """See `Source.check`: of each source."""
        for source in self.joined().values():
            source.check()

    def _join(self, parts: Sequence[Part], name: str, blocks: int = 1) -> Index:
        """Return the index of all rows; a sample that comes twice is two rows of one name.

        The blocks are the shards of the joined index, so that a plan that mixes some of them meets every source, and
        keeps together what lies close together in a source.
        """
        if not all(part.index.rows_are_samples for part in parts):
            raise ConfigError("data: streams cannot be mixed with other samples: give tars that can be indexed")
        self._parts = parts
        cuts = [np.linspace(0, len(part.rows), blocks + 1).round().astype(np.int64) for part in parts]
        sizes = np.array([np.diff(cut) for cut in cuts]).T  # (blocks, parts)
        self._part = np.repeat(np.tile(np.arange(len(parts)), blocks), sizes.ravel())
        spans = [part.rows[cut[b] : cut[b + 1]] for b in range(blocks) for part, cut in zip(parts, cuts, strict=True)]
        self._row = np.concatenate(spans)
        table = np.zeros(len(self._row), dtype=ROW_FIELDS)
        table["shard"] = np.repeat(np.arange(blocks), sizes.sum(axis=1))
        keys, content = np.empty(len(self._row), dtype=object), np.empty(len(self._row), dtype=np.uint64)
        for number, part in enumerate(parts):
            here = self._part == number
            for field in ("width", "height"):
                table[field][here] = part.index.table[field][self._row[here]]
            content[here] = part.index.content[self._row[here]]
            rows, places = np.unique(self._row[here], return_inverse=True)  # a row that repeats has one name
            names = [f"{part.prefix}{part.index.name(row)}".encode() for row in rows.tolist()]
            keys[here] = np.array(names, dtype=object)[places]
        filters = " ".join(part.index.filters for part in parts if part.index.filters)
        return Index(
            shards=(name,) * blocks,
            table=table,
            keys=np.array(keys.tolist()),
            filters=filters,
            metadata="+".join(part.index.metadata for part in parts if part.index.metadata),
            content=content,
        )

    def _place(self, row: int) -> tuple[Part, int]:
        return self._parts[self._part[row]], int(self._row[row])

    def read(self, row: int) -> RawSample:
        """Read one row from its source."""
        part, own_row = self._place(row)
        raw = part.source.read(own_row)
        return raw if part.weight == 1.0 else replace(raw, weight=part.weight * raw.weight)

    @property
    def part_names(self) -> tuple[str, ...]:
        """See `Source.part_names`: the last words of their keys."""
        return tuple(key.rpartition(".")[2] for key in self.joined())

    def part_of(self, row: int) -> int:
        """See `Source.part_of`."""
        return int(self._part[row])

    def captions_of(self, row: int) -> Captions:
        """Return the captions of the row's source."""
        part, own_row = self._place(row)
        return part.source.captions_of(own_row)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Let each source begin to read its own rows."""
        for number, part in enumerate(self._parts):
            own = [int(self._row[row]) for row in rows if self._part[row] == number]
            if own:
                part.source.prefetch(own)

    def record(self) -> None:
        """See `Source.record`: of each source."""
        for part in self._parts:
            part.source.record()
