"""The base of every source of samples, with the options that the loader owns.

A new source is one file here, one YAML in `conf/data` and one test. Reading belongs in the source; order,
batches and workers belong to `order/plan.py` and `loading/feed.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from cascade_train.data.buckets import Buckets, BucketTable
from cascade_train.data.captions import Captions
from cascade_train.data.files.limits import FileLimits
from cascade_train.data.index.quarantine import quarantine_selection, read_quarantine
from cascade_train.data.index.rows import Index
from cascade_train.data.index.selection import RowSelector
from cascade_train.data.index.size_filter import parse_size_filters, size_selection
from cascade_train.data.sample import RawSample
from cascade_train.options import File, Free, Order

if TYPE_CHECKING:
    from cascade_train.data.loading.feed import Feed, FeedRequest

START_METHODS = ("fork", "forkserver", "spawn")
CROPS = ("center", "random", "saliency")
LEFTOVERS = ("carry", "drop", "flush")


@dataclass(kw_only=True)
class Source(abc.ABC):
    """Where samples come from. The constructor checks ranges and touches no file.

    A resume and a cache hold to every option, except where its annotation declares it to be `Free` or `Order`.

    Attributes:
        is_cache: whether it holds what a cache was filled with, and no pictures.
        image_size: side of the square training picture in pixels; other shapes have about its area.
        crop: which part of a picture that has another shape than its batch: the middle, one drawn anew each epoch, or
            the one that stands out most.
        shuffle_window_shards: shards whose samples are mixed with each other; larger mixes better, smaller
            keeps reads close together.
        num_workers: processes that read and decode; 0 reads in the training process.
        worker_start: how a worker process starts.
        captions: makes each sample's caption from what `read` returns.
        size_filters: conditions on the size of each picture, in the forms of `row_filters`, on width, height,
            short_side, long_side, aspect_ratio and megapixels; None = pictures of all sizes.
        quarantine: a run, or a list that it left, whose unreadable samples are left out; None = all are tried.
        flip_prob: share of the pictures that are mirrored left to right, drawn anew each epoch.
        max_pixels: pixels of the largest picture that is decoded; larger ones count as unreadable. None = any.
        max_file_mib: size of the largest picture or mask that is read, before it is decoded; larger ones count as
            unreadable. None = any.
        max_text_kib: size of the largest caption, json or yaml that is read; larger ones count as unreadable. None =
            any.
        max_unreadable_share: share of unreadable samples above which a run stops.
        max_wait_seconds: how long to wait for one batch of the workers before the run stops; None = for ever.
        aspect_ratios: shapes of the training pictures, width to height: fractions or decimals, whose reciprocals are
            added, or a preset, original or wide; None = squares.
        buckets: how sizes follow from the ratios, and which pictures are too small.
        leftover: what becomes of samples that fill no global batch of their shape when an epoch ends: `carry` = they
            wait for the next epoch's, `drop` = they are left out, `flush` = they fill a batch together with repeats
            that do not count.
        replacement: draw shards with replacement, so that an epoch misses some and repeats others.
        num_examples_to_see: samples after which the run ends; None = as the training says.
        on_change: what a resume does where the data, its order or the batch size changed: `refuse`, or `restart`, which
            begins another epoch, or with another batch size continues the same one.
    """

    is_cache: ClassVar[bool] = False
    image_size: int
    crop: Literal["center", "random", "saliency"]
    shuffle_window_shards: Order[int]
    num_workers: Free[int]
    worker_start: Free[Literal["fork", "forkserver", "spawn"]]
    captions: Captions = field(default_factory=Captions)
    size_filters: list[list[Any]] | dict[str, str] | None = None
    quarantine: Order[File[str | None]] = None
    flip_prob: float = 0.0
    max_pixels: int | None = 2**27
    max_file_mib: int | None = 128
    max_text_kib: int | None = 1024
    max_unreadable_share: Free[float] = 0.01
    max_wait_seconds: Free[float | None] = 600.0
    aspect_ratios: list[str | float] | str | None = None
    buckets: Buckets = field(default_factory=Buckets)
    leftover: Order[Literal["carry", "drop", "flush"]] = "carry"
    replacement: Order[bool] = False
    num_examples_to_see: Free[int | None] = None
    on_change: Free[Literal["refuse", "restart"]] = "refuse"

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise ValueError(f"data.image_size={self.image_size} must be at least 1 px: it is the side of a picture")
        if self.crop not in CROPS:
            raise ValueError(f"data.crop={self.crop} is unknown: choose {', '.join(CROPS)}")
        if self.shuffle_window_shards < 1:
            raise ValueError(
                f"data.shuffle_window_shards={self.shuffle_window_shards} must be at least 1 (1 mixes within a shard)"
            )
        if self.num_workers < 0:
            raise ValueError(
                f"data.num_workers={self.num_workers} must be at least 0 (0 reads in the training process)"
            )
        if self.worker_start not in START_METHODS:
            raise ValueError(f"data.worker_start={self.worker_start} is unknown: choose {', '.join(START_METHODS)}")
        self._check_limits()
        self._size_filters = parse_size_filters(self.size_filters)
        self._check_order()

    def _check_limits(self) -> None:
        if not 0.0 <= self.flip_prob <= 1.0:
            raise ValueError(f"data.flip_prob={self.flip_prob} must lie between 0 and 1: it is a share of the pictures")
        if self.max_pixels is not None and self.max_pixels < 1:
            raise ValueError(f"data.max_pixels={self.max_pixels} must be at least 1, or null to decode any picture")
        for name in ("max_file_mib", "max_text_kib"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)} must be at least 1, or null to read any file")
        self.limits = FileLimits(max_file_mib=self.max_file_mib, max_text_kib=self.max_text_kib)
        if not 0.0 <= self.max_unreadable_share <= 1.0:
            raise ValueError(
                f"data.max_unreadable_share={self.max_unreadable_share} must lie between 0 and 1: 0.03 allows 3 in 100"
            )
        if self.max_wait_seconds is not None and self.max_wait_seconds <= 0.0:
            raise ValueError(f"data.max_wait_seconds={self.max_wait_seconds} must be above 0, or null to wait for ever")

    def _check_order(self) -> None:
        self._bucket_table = self.buckets.table(self.image_size, self.aspect_ratios)
        if self.leftover not in LEFTOVERS:
            raise ValueError(f"data.leftover={self.leftover} is unknown: choose {', '.join(LEFTOVERS)}")
        if self.on_change not in ("refuse", "restart"):
            raise ValueError(f"data.on_change={self.on_change} is unknown: choose refuse or restart")
        if self.num_examples_to_see is not None and self.num_examples_to_see < 1:
            raise ValueError(f"data.num_examples_to_see={self.num_examples_to_see} must be at least 1; null = no limit")

    def captions_of(self, row: int) -> Captions:
        """Return what makes the caption of one row; a source made of others asks the row's own."""
        return self.captions

    def check(self) -> None:
        """Find out at little cost whether the data is there, before anything is loaded; `open` finds what is left.

        Raises:
            ConfigError: a file, a folder or a column is missing.
        """

    @abc.abstractmethod
    def open(self) -> Index:
        """Read or make the index. Called once, before `read`.

        Raises:
            ConfigError: the data is missing or not of the form that the source reads.
            RunError: too much of the data is damaged.
        """

    @abc.abstractmethod
    def read(self, row: int) -> RawSample:
        """Read one row of the index, without decoding the picture. Runs in a worker process.

        Raises:
            UnreadableSampleError: the sample's content is damaged.
            OSError: the data cannot be reached.
        """

    def prefetch(self, rows: Sequence[int]) -> None:
        """Begin to read rows that `read` is about to be asked for, where that is worth it. Runs in a worker process."""
        del rows

    def record(self) -> None:
        """Write down what a resumed run must find again; called once the run directory is claimed, by one rank."""

    def bucket_table(self, index: Index) -> BucketTable:
        """Return the sizes that the samples are trained at; a source whose samples have theirs already names those."""
        del index
        return self._bucket_table

    def selectors(self) -> list[RowSelector]:
        """Return what decides, by the index alone, which rows take part.

        Raises:
            ConfigError: there is no list of unreadable samples where `quarantine` says.
        """
        selectors: list[RowSelector] = []
        if self._size_filters:
            selectors.append(partial(size_selection, self._size_filters))
        if self.quarantine is not None:
            names = read_quarantine(Path(self.quarantine).expanduser())
            selectors.append(partial(quarantine_selection, names))
        return [*selectors, lambda index: self.buckets.selection(index, self.bucket_table(index))]

    def own_feed(self, request: FeedRequest) -> Feed | None:
        """Return a feed of the source's own; None = `feed.Loader` over the index, the default.

        For sources that cannot be indexed.
        """
        del request
        return None
