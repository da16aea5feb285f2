"""One run's data: an opened source, split into training and held-out samples, and the feeds over them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cascade_train.batch import Batch, SampleTransform
from cascade_train.data.index.rows import Index, first_names, rows_digest, split
from cascade_train.data.index.selection import selected
from cascade_train.data.loading.feed import Feed, Loader
from cascade_train.data.loading.stream_feed import StreamFeed
from cascade_train.data.order.plan import permutation
from cascade_train.data.order.position import FeedRequest, ShapeGroups
from cascade_train.data.sample import most_unreadable, too_many_text
from cascade_train.data.source import Source
from cascade_train.data.webdataset import WebDataset
from cascade_train.errors import ConfigError, RunError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Samples that belong together: an opened source, its index, and which rows of it."""

    source: Source  # opened
    index: Index  # what its `open` returned
    rows: np.ndarray  # sorted rows of the index
    digest: str  # of them, see `rows_digest`
    transform: SampleTransform | None = None  # what the workers make of each picture for the task; None = nothing

    @property
    def shapes(self) -> np.ndarray:
        """Number of samples of each shape that occurs, the largest first, (K,) int64; unbounded for streams."""
        if not self.index.rows_are_samples:
            return np.array([np.iinfo(np.int64).max])
        count_K = ShapeGroups.of(self.source, self.index, self.rows, self.digest).groups.sizes
        return -np.sort(-count_K[count_K > 0])

    def first(self, count: int, *, seed: int) -> Rows:
        """`count` of the samples, drawn by the seed; all where there are no more."""
        rows = np.sort(self.rows[permutation(len(self.rows), seed, 0, "part")[:count]])
        return replace(self, rows=rows, digest=rows_digest(rows))

    def load(self, **options: Any) -> Feed:
        """Endless feed of these samples for one rank; options are those of `FeedRequest`."""
        request = FeedRequest(
            index=self.index, rows=self.rows, rows_digest=self.digest, transform=self.transform, **options
        )
        return feed_of(self.source, request)


def feed_of(source: Source, request: FeedRequest) -> Feed:
    """Make the feed of an opened source. Raises as `Loader` and `StreamFeed`."""
    if request.index.rows_are_samples:
        return Loader(source, request)
    assert isinstance(source, WebDataset), "all other sources have an index"
    return StreamFeed(source, request)


@dataclass(frozen=True, kw_only=True)
class HeldOutFeed:
    """The same held-out global batches each time it is started over."""

    steps: int  # global batches of one measurement
    feed: Feed
    source: Source  # of the samples

    def from_start(self) -> Iterator[list[Batch]]:
        """Start over and yield this rank's micro-batches of `steps` global batches."""
        self.feed.seek(0)
        for _ in range(self.steps):
            yield next(self.feed)


class DataSet:
    """Training and held-out samples, and the open feeds over them."""

    def __init__(self, training: Rows, held_out: Rows | None) -> None:
        self.training, self.held_out = training, held_out
        self._parts = [part for part in (training, held_out) if part is not None]
        self._open: list[Feed] = []

    def check_sides(self, multiple: int) -> None:
        """Raise a ConfigError where a side of a training size is no multiple of `multiple` px, as the model needs."""
        for part in self._parts:
            for height, width in part.source.bucket_table(part.index).sizes_K2.tolist():
                if height % multiple or width % multiple:
                    squares = part.source.aspect_ratios is None
                    remedy = "image_size" if squares else f"data.buckets.multiple_px={multiple}, or image_size"
                    text = f"data makes pictures of {height} x {width} pixels, but the model needs"
                    raise ConfigError(f"{text} multiples of {multiple}: choose {remedy}")

    def check_batch(self, global_batch_size: int) -> None:
        """Raise a ConfigError where a batch takes more than all training samples."""
        count = len(self.training.rows)
        if self.training.index.rows_are_samples and global_batch_size > count:
            raise ConfigError(
                f"train.global_batch_size={global_batch_size} is more than the {count} samples to train on: set it to"
                f" {count} or less, or repeat pictures (multiply.txt of a folder, data.repeats of a mixture)"
            )

    def training_feed(self, **options: Any) -> Feed:
        """Endless feed of training batches for one rank."""
        self._open.append(feed := self.training.load(**options))
        for line in feed.report():
            _log.info("%s", line)
        return feed

    def last_step(
        self,
        feed: Feed,
        *,
        max_steps: int | None,
        max_epochs: int | None,
        global_batch_size: int,
        step: int = 0,
        samples_seen: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> int:
        """Step at which training ends; `step`, `samples_seen` and `state` are those of the resumed checkpoint."""
        examples = self.training.source.num_examples_to_see
        left = None if examples is None else -(-examples // global_batch_size) - samples_seen // global_batch_size
        limits = [
            max_steps,
            None if max_epochs is None else feed.steps_of_epochs(max_epochs, state),
            None if left is None else step + max(0, left),
        ]
        return min(limit for limit in limits if limit is not None)

    def held_out_feed(self, *, seed: int, samples: int, micro_batch_size: int, rank: int, ranks: int) -> HeldOutFeed:
        """Feed of `samples` held-out samples in a fixed order; those of weight 0 fill the last batch of each shape."""
        if self.held_out is None:
            raise ConfigError("validate: no samples are held out; set validate.share, e.g. 0.01, or validate.urls")
        part = self.held_out.first(samples, seed=seed)
        micro = max(1, min(micro_batch_size, len(part.rows) // len(part.shapes) // ranks))
        size = micro * ranks
        feed = part.load(
            seed=seed, global_batch_size=size, micro_batch_size=micro, rank=rank, ranks=ranks, whole_epochs=True
        )
        self._open.append(feed)
        return HeldOutFeed(steps=feed.steps_of_epochs(1), feed=feed, source=part.source)

    def shown_batch(self, count: int, *, seed: int) -> Batch:
        """Up to `count` fixed samples of one shape to show, held-out ones where there are any."""
        part = self.held_out or self.training
        count = min(count, int(part.shapes[0]))
        with contextlib.closing(
            part.load(seed=seed, global_batch_size=count, micro_batch_size=count, rank=0, ranks=1, whole_epochs=True)
        ) as feed:
            return next(feed)[0]

    @property
    def identity(self) -> str:
        """Equal on all ranks: digests of the indexes, their content, and how many rows take part."""
        return " ".join(f"{part.index.digest}/{part.index.content_record}/{len(part.rows)}" for part in self._parts)

    def record(self) -> None:
        """See `Source.record`."""
        for part in self._parts:
            part.source.record()

    def close(self) -> None:
        """Close all feeds."""
        for feed in self._open:
            feed.close()


def open_data_set(
    source: Source, *, share: float | None, held_out: Source | None, transform: SampleTransform | None = None
) -> DataSet:
    """Open `source`; hold out samples of another, or a share by a hash of the keys; None = none. See `Source.open`."""
    whole = _open_rows(source, transform)
    if held_out is not None:
        return DataSet(whole, _open_rows(held_out, transform))
    if share is None:
        return DataSet(whole, None)

    def divide() -> dict[str, np.ndarray]:
        sides = zip(("training", "held"), split(whole.index, share), strict=True)
        return _with_digests({side: np.intersect1d(rows, whole.rows) for side, rows in sides})

    parts = whole.index.kept("split", f"{share!r}/{whole.digest}", divide)
    if len(parts["training"]) == 0 or len(parts["held"]) == 0:
        sizes = f"{len(parts['training'])} are left to train on and {len(parts['held'])} held out"
        raise ConfigError(f"validate.share={share}: of {len(whole.rows)} samples that take part {sizes}; add data")
    sides = (replace(whole, rows=parts[side], digest=parts[f"{side}_digest"].item()) for side in ("training", "held"))
    return DataSet(*sides)


def _open_rows(source: Source, transform: SampleTransform | None) -> Rows:
    index = source.open()
    kept_N = selected(index, source.selectors())

    def choose() -> dict[str, np.ndarray]:
        rows = np.flatnonzero(kept_N)
        return {**_with_digests({"rows": rows}), "no_header": rows[index.table["width"][rows] == 0]}

    parts = index.kept("rows", "" if kept_N.all() else hashlib.sha256(np.packbits(kept_N).data).hexdigest(), choose)
    if index.rows_are_samples:
        _check_headers(index, parts["no_header"], len(parts["rows"]), source.max_unreadable_share)
    digest = parts["rows_digest"].item()
    return Rows(source=source, index=index, rows=parts["rows"], digest=digest, transform=transform)


def _with_digests(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**rows, **{f"{name}_digest": np.array(rows_digest(part)) for name, part in rows.items()}}


def _check_headers(index: Index, rows: np.ndarray, total: int, share: float) -> None:
    """Warn of rows, among the total, whose headers cannot be read; a RunError where they are too many."""
    names = sorted({index.name(row) for row in rows.tolist()})
    if len(names) > most_unreadable(total, share):
        listed = f"{first_names(names, 10)} (no header that tells the size)"
        raise RunError(f"data: {too_many_text(len(names), total, share, listed)}")
    if names:
        _log.warning(
            "%d of %d pictures have no header that can be read: %s. Others stand in for them; a new run leaves them out"
            " by data.quarantine=<list>, which `cascade-train inspect quarantine=<list>` writes.",
            len(names), total, first_names(names),
        )  # fmt: skip
