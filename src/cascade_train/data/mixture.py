"""Several sources as one: a mixture of any number, or your pictures with regularisation pictures."""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cascade_train.data.buckets import BucketTable, exact_table
from cascade_train.data.captions import Captions
from cascade_train.data.index.rows import ROW_FIELDS, Index, repeat_counts, repeat_rows
from cascade_train.data.index.selection import RowSelector, selected
from cascade_train.data.sample import RawSample
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError
from cascade_train.options import Order, Positive

LEAST_BLOCK = 1024  # samples: a block of fewer would hold too few of a small source to keep its share
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """One of the joined sources."""

    source: Source  # opened
    index: Index  # what its `open` returned
    rows: np.ndarray  # (N,) int64 rows of the index, in the order in which they are laid out, repeated ones included
    buckets: BucketTable  # the sizes that its samples are trained at
    prefix: str = ""  # of its keys in the joined index
    weight: float = 1.0  # of its samples' losses


@dataclass(kw_only=True)
class JoinedSource(Source):
    """Sources laid out in blocks, each with an equal part of every source, at their own `image_size`."""

    @abc.abstractmethod
    def joined(self) -> Mapping[str, Source]:
        """Sources by their keys below `data`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parts: Sequence[Part] = ()
        if self.captions != Captions():
            keys = ", ".join(f"data.{key}.captions" for key in self.joined())
            raise ValueError(f"data.captions belongs to each of the joined sources here: set {keys}")
        for key, part in self.joined().items():
            if part.is_cache:
                raise ValueError(f"data.{key}: a cache cannot be joined with other data; make a cache of the mixture")
        tables = [self._table_of(part) for part in self.joined().values()]
        self.has_sizes = any(table.identity != self._bucket_table.identity for table in tables)
        if self.has_sizes:
            self._check_sizes()
            sizes = dict.fromkeys(tuple(size) for table in tables for size in table.sizes_K2.tolist())
            self._bucket_table = exact_table(np.array([*sizes], dtype=np.int64))

    def _check_sizes(self) -> None:
        """Check that what looks at sizes can tell those of one source from those of another."""
        if self.buckets.random_share > 0.0:
            share = f"data.buckets.random_share={self.buckets.random_share:g}"
            raise ValueError(f"{share} would mix sizes of the sources: set it to 0, or give all one image_size")
        for key, part in self.joined().items():
            by_size = self._size_filters or self.buckets.max_upscale is not None
            if by_size and isinstance(part, JoinedSource) and part.has_sizes:
                raise ValueError(f"data.{key} has sizes of its own: set size_filters and buckets.max_upscale there")

    def _table_of(self, part: Source) -> BucketTable:
        if isinstance(part, JoinedSource) and part.has_sizes:
            return part._bucket_table
        return self.buckets.table(part.image_size, self.aspect_ratios)

    def selectors(self) -> list[RowSelector]:
        """See `Source.selectors`; by size, each source is asked as it is opened where the joined index lists others."""
        return self.quarantine_selectors() if self.has_sizes else super().selectors()

    def check(self) -> None:
        """See `Source.check`: of each source."""
        for source in self.joined().values():
            source.check()

    def _open_parts(self) -> dict[str, Part]:
        parts = {}
        for key, source in self.joined().items():
            index, table = source.open(), self._table_of(source)
            by_size = self.size_selectors(table) if self.has_sizes else []
            rows = np.flatnonzero(selected(index, [*source.selectors(), *by_size]))
            parts[key] = Part(source=source, index=index, rows=rows, buckets=table)
        return parts

    def _join(self, parts: Sequence[Part], name: str, blocks: int = 1) -> Index:
        """Index of all rows; a sample that comes twice is two rows of one name."""
        if not all(part.index.rows_are_samples for part in parts):
            raise ConfigError("data: streams cannot be mixed with other samples: give tars that can be indexed")
        self._parts = parts
        cuts = [np.linspace(0, len(part.rows), blocks + 1).round().astype(np.int64) for part in parts]
        sizes = np.array([np.diff(cut) for cut in cuts]).T  # (blocks, parts)
        self._part = np.repeat(np.tile(np.arange(len(parts)), blocks), sizes.ravel())
        pairs = list(zip(parts, cuts, strict=True))
        self._row = np.concatenate([part.rows[cut[b] : cut[b + 1]] for b in range(blocks) for part, cut in pairs])
        table = np.zeros(len(self._row), dtype=ROW_FIELDS)
        table["shard"] = np.repeat(np.arange(blocks), sizes.sum(axis=1))
        keys, pictures = (np.empty(len(self._row), dtype=object) for _ in range(2))
        content = np.empty(len(self._row), dtype=np.uint64)
        shards = [set(part.index.shards) for part in parts]
        may_share = len(set().union(*shards)) < sum(map(len, shards))  # names begin with those of shards
        different, come_again = set[str](), False  # names, and whether several sources have one
        for number, part in enumerate(parts):
            here = self._part == number
            width_N, height_N = (part.index.table[field][self._row[here]] for field in ("width", "height"))
            if self.has_sizes:
                trained_N2 = part.buckets.sizes_K2[part.buckets.nearest(width_N, height_N)]
                height_N, width_N = np.where((width_N > 0) & (height_N > 0), trained_N2.T, 0)
            table["width"][here], table["height"][here] = width_N, height_N
            content[here] = part.index.content[self._row[here]]
            rows, places = np.unique(self._row[here], return_inverse=True)  # a row that repeats has one name
            names = [part.index.name(row) for row in rows.tolist()]
            if may_share:
                come_again = come_again or not different.isdisjoint(names)
                different.update(names)
            keys[here] = np.array([f"{part.prefix}{name}".encode() for name in names], dtype=object)[places]
            by = part.index.split_by
            split_names = [name.encode() for name in names] if by is None else by[rows].tolist()
            pictures[here] = np.array(split_names, dtype=object)[places]
        return Index(
            shards=(name,) * blocks,
            table=table,
            keys=np.array(keys.tolist()),
            filters=" ".join(part.index.filters for part in parts if part.index.filters),
            metadata="+".join(part.index.metadata for part in parts if part.index.metadata),
            content=content,
            split_by=np.array(pictures.tolist()) if self.has_sizes or come_again else None,
        )

    def read(self, row: int) -> RawSample:
        """See `Source.read`: read one row from its source."""
        part = self._parts[self._part[row]]
        raw = part.source.read(int(self._row[row]))
        return raw if part.weight == 1.0 else replace(raw, weight=part.weight * raw.weight)

    @property
    def part_names(self) -> tuple[str, ...]:
        """See `Source.part_names`: the last words of their keys."""
        return tuple(key.rpartition(".")[2] for key in self.joined())

    def part_of(self, row: int) -> int:
        """See `Source.part_of`."""
        return int(self._part[row])

    def captions_of(self, row: int) -> Captions:
        """See `Source.captions_of`."""
        return self._parts[self._part[row]].source.captions_of(int(self._row[row]))

    def prefetch(self, rows: Sequence[int]) -> None:
        """See `Source.prefetch`: each source begins to read its own rows."""
        for number, part in enumerate(self._parts):
            if mine := [int(self._row[row]) for row in rows if self._part[row] == number]:
                part.source.prefetch(mine)

    def record(self) -> None:
        """See `Source.record`: of each source."""
        for part in self._parts:
            part.source.record()


@dataclass(kw_only=True)
class Mixture(JoinedSource):
    """Sources by name. Crop, buckets and workers are the mixture's; captions and filters are each source's own.

    A sample that comes more than once in an epoch is another sample each time, with draws of its own. Where a number
    is not whole, the samples that come once more are the same in every epoch. With `shares`, every sample comes at
    least once, and sources are repeated until their shares are met.
    """

    sources: dict[str, Source]
    repeats: Order[dict[str, float] | None]
    shares: Order[dict[str, float] | Literal["equal"] | None]
    loss_weights: dict[str, float] | None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources={} names nothing to mix: add +data@data.sources.mine=folder")
        if isinstance(self.shares, str) and self.shares != "equal":
            raise ValueError(f"data.shares={self.shares} is unknown: write equal, or a share of each source")
        if self.shares is not None and self.repeats is not None:
            raise ValueError("data.repeats and data.shares both say how often samples come: set one of them to null")
        for key in ("repeats", "shares", "loss_weights"):
            numbers = getattr(self, key)
            for name, number in numbers.items() if isinstance(numbers, Mapping) else ():
                if name not in self.sources:
                    raise ValueError(f"data.{key}.{name} names no source; there are {', '.join(self.sources)}")
                if number <= 0:
                    raise ValueError(f"data.{key}.{name}={number} must be above 0; leave the source out instead")
        if isinstance(self.shares, Mapping) and (missing := set(self.sources) - set(self.shares)):
            raise ValueError(f"data.shares has none for {', '.join(sorted(missing))}: give every source a share")
        super().__post_init__()

    def joined(self) -> dict[str, Source]:
        """See `JoinedSource.joined`."""
        return {f"sources.{name}": source for name, source in self.sources.items()}

    def open(self) -> Index:
        """Open every source and lay their samples out, as often as they come. Raises as theirs."""
        opened = dict(zip(self.sources, self._open_parts().values(), strict=True))
        factors = self._factors({name: len(part.rows) for name, part in opened.items()})
        parts = []
        for name, part in opened.items():
            weight = (self.loss_weights or {}).get(name, 1.0)
            parts.append(replace(part, rows=_repeat_rows(name, part, factors[name]), prefix=f"{name}/", weight=weight))
        total = sum(len(part.rows) for part in parts)
        for name, part in zip(opened, parts, strict=True):
            share, text = 100 * len(part.rows) / total, "%s: %d samples an epoch (%.1f %%), each %.3g times, at %d px."
            _log.info(text, name, len(part.rows), share, factors[name], part.source.image_size)
        shards = max(len(part.index.shards) for part in parts)
        blocks = max(1, min(shards, total // LEAST_BLOCK))  # as the source of most shards has, none of them small
        return self._join(parts, "mixture", blocks)

    def _factors(self, sizes: Mapping[str, int]) -> dict[str, float]:
        if self.shares is None:
            return {name: (self.repeats or {}).get(name, 1.0) for name in sizes}
        shares = dict.fromkeys(sizes, 1.0) if isinstance(self.shares, str) else self.shares
        epoch = max(size / shares[name] for name, size in sizes.items())  # its length, in shares
        return {name: epoch * shares[name] / size for name, size in sizes.items()}


def _repeat_rows(name: str, part: Part, factor: float) -> np.ndarray:
    counts = np.zeros(len(part.index), dtype=np.int64)
    counts[part.rows] = repeat_counts(part.index.keys[part.rows].tolist(), factor)
    if not counts.any():
        raise ConfigError(f"data.repeats.{name}={factor} of {len(part.rows)} samples is less than one; raise it")
    return repeat_rows(counts)


@dataclass(kw_only=True)
class Regularised(JoinedSource):
    """Your pictures, mixed with regularisation pictures whose loss has a weight of its own.

    That loss is what DreamBooth calls prior preservation (Ruiz et al. 2022, equation 2). One epoch has the smaller side
    as often as it takes to come closest to the share; each time a picture comes it is another sample, with draws of its
    own. All shards of both are mixed, so that every batch has about the share. Crop and workers are this source's.
    """

    source: Source
    regularisation: Source
    share: Order[float]
    weight: Positive[float]

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"data.share={self.share} must lie between 0 and 1: it is the regularisation's part")
        super().__post_init__()

    def joined(self) -> dict[str, Source]:
        """See `JoinedSource.joined`."""
        return {"source": self.source, "regularisation": self.regularisation}

    def open(self) -> Index:
        """Open both and return one index, in which the smaller side is repeated."""
        main, other = self._open_parts().values()
        times = _repetitions(len(main.rows), len(other.rows), 1 - self.share)
        other_times = _repetitions(len(other.rows), len(main.rows), self.share)
        main = replace(main, rows=np.tile(main.rows, times))
        other = replace(other, rows=np.tile(other.rows, other_times), weight=self.weight)
        return self._join([main, other], "regularised")


def _repetitions(count: int, others: int, share: float) -> int:
    """How often `count` samples come beside `others` to be `share` of all: once, unless they are too few."""
    return max(1, round(others * share / (1 - share) / count))
