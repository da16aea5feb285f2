"""Captioned pictures in tar files of the webdataset layout, read by offset, or as streams where they have none."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cascade_train.data.index.row_filter import parse_row_filters
from cascade_train.data.index.rows import BEGINNING_BYTES, ROW_FIELDS, Index, checksum, combine, text_checksum
from cascade_train.data.index.selection import RowSelector
from cascade_train.data.sample import RawSample
from cascade_train.data.source import Source
from cascade_train.data.stream import Streams
from cascade_train.data.tar.files import Listings, Tar, check_urls, find_tars
from cascade_train.data.tar.index import JoinedTars, reading_tars
from cascade_train.data.tar.members import PARTS, raw_sample
from cascade_train.data.tar.storage import ReadAhead, Store
from cascade_train.errors import ConfigError
from cascade_train.options import File, Free, Order, Positive

_READ_ACROSS_BYTES = 64 * 1024  # parts of a sample closer than this are read at once
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class WebDataset(Source):
    """Samples KEY.jpg (or jpeg, png, webp) with KEY.txt in tar files, and with KEY.json and KEY.mask.png if there."""

    urls: Order[File[list[str] | str]]
    index_dir: Free[str | None]
    row_filters: Order[list[list[Any]] | dict[str, str] | None]
    listing: Free[str | None] = None
    buffer_samples: Order[Positive[int]] = 256

    caption = PARTS["caption"]  # the extension of caption files, for sources that inherit

    def __post_init__(self) -> None:
        super().__post_init__()
        entries = [self.urls] if isinstance(self.urls, str) else list(self.urls)
        if not entries or not all(isinstance(entry, str) and entry for entry in entries):
            raise ValueError(f"data.urls={self.urls} must be a path or a list of paths")
        self._filters = parse_row_filters(self.row_filters)
        self._cache_dir = None if self.index_dir is None else Path(self.index_dir).expanduser()
        self._tars: list[Tar] = []
        self._listings = Listings(None if self.listing is None else Path(self.listing))
        self._stores: list[Store] = []
        self._ahead: ReadAhead[dict[str, bytes]] | None = None

    @property
    def needed(self) -> Literal["caption", "json"]:
        """The part that makes the caption of a sample."""
        return "caption" if self.captions.needs_text else "json"

    def check(self) -> None:
        """See `Source.check`: the tars on disks; stores are not asked."""
        check_urls(self.urls)

    def open(self) -> Index:
        """See `Source.open`: index every tar, or take its index from the cache."""
        joined = self.joined_tars()
        if joined is None:
            with reading_tars():
                return self._open_streams()
        parts, folder = joined.open()
        self._index = Index(
            shards=tuple(tar.name for tar in self._tars),
            table=parts["table"],
            keys=parts["keys"],
            content=parts["content"],
            filters=self._filters.identity,
            folder=folder,
        )
        self._stores = list({id(tar.store): tar.store for tar in self._tars if tar.store is not None}.values())
        threads = max(store.parallel_reads for store in self._stores)
        self._ahead = ReadAhead(threads) if threads > 1 else None
        return self._index

    def joined_tars(self) -> JoinedTars | None:
        """Find the tars, whose index it then makes or reads; None where one cannot be indexed. Raises as `open`."""
        with reading_tars():
            self._tars = [replace(tar, caption=self.caption) for tar in find_tars(self.urls, self._listings)]
        if not all(tar.is_indexable for tar in self._tars):
            return None
        return JoinedTars(
            tars=self._tars,
            cache_dir=self._cache_dir,
            filters=self._filters,
            largest_json=None if self.max_text_kib is None else self.max_text_kib * 1024,
            used=[part != "json" or self.captions.needs_values for part in ("image", *PARTS)],
            needed=self.needed,
        )

    def _open_streams(self) -> Index:
        """An index of the tars; an option that needs one of samples is refused."""
        streamed = next(tar.name for tar in self._tars if not tar.is_indexable)
        for key in ("aspect_ratios", "size_filters", "quarantine", "buckets.max_upscale"):
            if (value := attrgetter(key)(self)) is not None:
                text = f"data.{key}={value} needs an index of all samples, but {streamed} cannot be indexed"
                raise ConfigError(f"{text}: set it to null, or give tars that are neither piped nor compressed")
        _log.info("%s cannot be indexed: all tars are streamed", streamed)
        rows = [(number, 0, 0, tar.item.size) for number, tar in enumerate(self._tars)]
        names = tuple(tar.identity for tar in self._tars)
        return Index(
            shards=names,
            table=np.array(rows, dtype=[*ROW_FIELDS, ("bytes", "<i8")]),
            keys=np.array([name.encode() for name in names]),
            filters=self._filters.identity,
            content=combine(np.array([_content_checksum(tar) for tar in self._tars])),
            rows_are_samples=False,
        )

    def streams(self, rows: Sequence[int], seed: int, *, mixed: bool) -> Streams:
        """Some of the tars, by row of the index, as streams; samples that are not mixed come as they are read."""
        limits = [size for size in (self.max_file_mib, self.max_text_kib and self.max_text_kib / 1024) if size]
        return Streams(
            tars=self._tars,
            rows=rows,
            seed=seed,
            buffer_samples=self.buffer_samples if mixed else 1,
            filters=self._filters,
            needed=self.needed,
            keeps_json=self.captions.needs_values,
            max_file_bytes=int(max(limits) * 2**20) if len(limits) == 2 else None,
        )

    def selectors(self) -> list[RowSelector]:
        """See `Source.selectors`; of streams, whose rows are tars, all take part."""
        return super().selectors() if self._stores else []

    def record(self) -> None:
        """See `Source.record`: the listings of S3 prefixes."""
        self._listings.write()

    def prefetch(self, rows: Sequence[int]) -> None:
        """See `Source.prefetch`: remote rows, several at a time."""
        if self._ahead is not None:
            for store in self._stores:
                store.prepare()
            shards = self._index.table["shard"]
            self._ahead.begin([row for row in rows if self._tars[shards[row]].is_remote], self._parts)

    def read(self, row: int) -> RawSample:
        """See `Source.read`."""
        if not self._stores:
            raise ConfigError("data.urls are streams, of which no single sample can be read: they stand alone as data")
        parts = self._parts(row) if self._ahead is None else self._ahead.take(row, self._parts)
        return raw_sample(parts, self._index.name(row), needs_values=self.captions.needs_values)

    def _parts(self, row: int) -> dict[str, bytes]:
        """Bytes of the parts that are there, with as few reads as possible."""
        entry = self._index.table[row]
        tar = self._tars[entry["shard"]]
        wanted = ["image", *(part for part in PARTS if part != "json" or self.captions.needs_values)]
        places = {part: (int(entry[f"{part}_start"]), int(entry[f"{part}_bytes"])) for part in wanted}
        for part, (_, size) in places.items():
            self.limits.check(part, size)
        contents = {}
        for group in _group_neighbours({part: place for part, place in places.items() if place[0]}):
            begin = group[0][1]
            content = tar.read(begin, group[-1][1] + group[-1][2] - begin)
            contents.update({part: content[start - begin : start - begin + size] for part, start, size in group})
        return contents


def _content_checksum(tar: Tar) -> int:
    if tar.is_remote:
        return text_checksum(tar.item.version)  # an ETag
    with tar.open() as file:
        return checksum(file.read(BEGINNING_BYTES), tar.item.size)


def _group_neighbours(places: dict[str, tuple[int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    """Group parts (name, start, size) that lie close to each other, in the order of the tar."""
    group: list[tuple[str, int, int]] = []
    for part, (start, size) in sorted(places.items(), key=lambda item: item[1]):
        if group and start - sum(group[-1][1:]) > _READ_ACROSS_BYTES:
            yield group
            group = []
        group.append((part, start, size))
    yield group
