"""The base of every source of samples, with the options that the loader owns, and that of sources of files.

A new source is one file here, one YAML in `conf/data` and one test.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from cascade_train.data.buckets import Buckets, BucketTable
from cascade_train.data.captions import Captions
from cascade_train.data.index.row_filter import parse_row_filters
from cascade_train.data.index.rows import Index
from cascade_train.data.index.selection import (
    RowSelector,
    parse_size_filters,
    quarantine_selection,
    read_quarantine,
    size_selection,
)
from cascade_train.data.sample import FileLimits, RawSample
from cascade_train.errors import RunError
from cascade_train.options import File, Free, Order, Positive, Share, check_fields, check_least


@dataclass(kw_only=True)
class Source(abc.ABC):
    """Where samples come from. The constructor checks ranges and touches no file; conf/data documents the options.

    Every option is fixed for a resume and a cache, except where its annotation declares it `Free` or `Order`.
    """

    is_cache: ClassVar[bool] = False  # whether it holds what a cache was filled with, and no pictures
    image_size: Positive[int]
    crop: Literal["center", "random", "saliency"]
    shuffle_window_shards: Order[Positive[int]]
    num_workers: Free[int]
    worker_start: Free[Literal["fork", "forkserver", "spawn"]]
    captions: Captions = field(default_factory=Captions)
    size_filters: list[list[Any]] | dict[str, str] | None = None
    quarantine: Order[File[str | None]] = None
    exclude: Free[list[str] | None] = None
    flip_prob: Share[float] = 0.0
    max_pixels: Positive[int | None] = 2**27
    max_file_mib: Positive[int | None] = 128
    max_text_kib: Positive[int | None] = 1024
    max_unreadable_share: Free[Share[float]] = 0.01
    max_wait_seconds: Free[Positive[float | None]] = 600.0
    aspect_ratios: list[str | float] | str | None = None
    buckets: Buckets = field(default_factory=Buckets)
    replacement: Order[bool] = False
    num_examples_to_see: Free[Positive[int | None]] = None
    on_change: Free[Literal["refuse", "restart"]] = "refuse"

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        check_least("data.num_workers", self.num_workers, 0, "0 reads in the training process")
        self.limits = FileLimits(max_file_mib=self.max_file_mib, max_text_kib=self.max_text_kib)
        self._size_filters = parse_size_filters(self.size_filters)
        self._bucket_table = self.buckets.table(self.image_size, self.aspect_ratios)

    def captions_of(self, row: int) -> Captions:
        """Caption options of one row; joined sources return those of the row's own source."""
        return self.captions

    def check(self) -> None:
        """Raise a ConfigError where a file, a folder or a column is missing; cheap, before anything is loaded."""

    @abc.abstractmethod
    def open(self) -> Index:
        """Read or make the index, once. A ConfigError for missing data, a RunError where too much is damaged."""

    @abc.abstractmethod
    def read(self, row: int) -> RawSample:
        """Read a row in a worker, without decoding; damage is an UnreadableSampleError, lost data an OSError."""

    def prefetch(self, rows: Sequence[int]) -> None:
        """Begin to read rows that `read` will soon get, where that pays. Runs in a worker process."""

    def record(self) -> None:
        """Write down what a resumed run needs; called by one rank once the run directory is claimed."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the joined sources, under which their losses are logged; empty = a single source."""
        return ()

    def part_of(self, row: int) -> int:
        """Number among `part_names` of the source of a row of the index."""
        raise AssertionError("asked for with part_names alone")

    def bucket_table(self, index: Index) -> BucketTable:
        """Sizes that the samples are trained at."""
        return self._bucket_table

    def quarantine_selectors(self) -> list[RowSelector]:
        """What leaves out the samples that `quarantine` lists; a ConfigError where there is no such list."""
        if self.quarantine is None:
            return []
        return [partial(quarantine_selection, read_quarantine(Path(self.quarantine).expanduser()))]

    def selectors(self) -> list[RowSelector]:
        """What decides, by the index alone, which rows take part. Raises as `quarantine_selectors`."""
        return [*self.quarantine_selectors(), *self.size_selectors(None)]

    def size_selectors(self, table: BucketTable | None) -> list[RowSelector]:
        """What decides by sizes of pictures, and by those they are trained at; None = the source's own."""
        selectors: list[RowSelector] = [partial(size_selection, self._size_filters)] if self._size_filters else []
        if self.buckets.max_upscale is not None:
            selectors.append(lambda index: self.buckets.selection(index, table or self.bucket_table(index)))
        return selectors


@dataclass(kw_only=True)
class FileSource(Source):
    """Pictures in files; what is read of files that did not change comes from a cache."""

    path: Order[File[list[str] | str]]
    index_dir: Free[str | None]
    row_filters: Order[list[list[Any]] | dict[str, str] | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._filters = parse_row_filters(self.row_filters)
        self._cache_dir = None if self.index_dir is None else Path(self.index_dir).expanduser()

    def open(self) -> Index:
        """See `Source.open`: index all files."""
        try:
            self._index = self._build_index()
        except OSError as error:
            raise RunError(f"data.path={self.path} cannot be read: {error}") from error
        return self._index

    @abc.abstractmethod
    def _build_index(self) -> Index:
        """Index of the usable samples that meet the row filters."""
