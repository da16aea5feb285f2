"""One run's data: an opened source, split into training and held-out samples, and the feeds over them.

Order lives in `order/plan.py`, batches in `loading/feed.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cascade_train.batch import Batch, SampleTransform
from cascade_train.data.index.rows import Index, split
from cascade_train.data.index.selection import selected
from cascade_train.data.loading.feed import Feed, FeedRequest, Gather, Loader, alone
from cascade_train.data.order.epoch import permutation
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Samples that belong together: an opened source, its index, and which rows of it."""

    source: Source  # opened
    index: Index  # what its `open` returned
    rows: np.ndarray  # sorted rows of the index
    transform: SampleTransform | None = None  # what the workers make of each picture for the task; None = nothing

    @property
    def shapes(self) -> np.ndarray:
        """How many samples each shape that occurs has, the most first, (K,) int64; unbounded for streams."""
        if not self.index.rows_are_samples:
            return np.array([np.iinfo(np.int64).max])
        width_N, height_N = (self.index.table[name][self.rows] for name in ("width", "height"))
        count_K = np.bincount(self.source.bucket_table(self.index).nearest(width_N, height_N))
        return -np.sort(-count_K[count_K > 0])

    def first(self, count: int, *, seed: int) -> Rows:
        """Return `count` of the samples, drawn by the seed; all where there are no more."""
        chosen = permutation(len(self.rows), seed, 0, "part")[:count]
        return replace(self, rows=np.sort(self.rows[chosen]))

    def load(self, **options: Any) -> Feed:
        """Return the endless feed of these samples for one rank; the options are the others of `FeedRequest`."""
        request = FeedRequest(index=self.index, rows=self.rows, transform=self.transform, **options)
        return self.source.own_feed(request) or Loader(self.source, request)


class HeldOutFeed:
    """The same held-out global batches each time it is started over."""

    def __init__(self, loader: Feed, steps: int) -> None:
        """`steps` global batches make one measurement."""
        self.steps, self._loader = steps, loader

    def from_start(self) -> Iterator[list[Batch]]:
        """Start over and yield this rank's micro-batches of `steps` global batches."""
        self._loader.seek(0)
        for _ in range(self.steps):
            yield next(self._loader)

    def close(self) -> None:
        """End the worker processes."""
        self._loader.close()


class DataSet:
    """Training and held-out samples, and the open feeds over them."""

    def __init__(self, training: Rows, held_out: Rows | None) -> None:
        self.training, self.held_out = training, held_out
        self._open: list[Feed | HeldOutFeed] = []

    def check_sides(self, multiple: int) -> None:
        """Check that both sides of every training size are multiples of `multiple` pixels, as the model needs.

        Raises:
            ConfigError: one is not.
        """
        for part in filter(None, (self.training, self.held_out)):
            for height, width in part.source.bucket_table(part.index).sizes_K2.tolist():
                if height % multiple or width % multiple:
                    raise ConfigError(
                        f"data.buckets.multiple_px={part.source.buckets.multiple_px} makes pictures of {height} x"
                        f" {width} pixels, but the model needs sides that are multiples of {multiple}: set it to that"
                    )

    def training_feed(
        self,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        ranks: int,
        gather: Gather = alone,
    ) -> Feed:
        """Return the endless feed of training batches for one rank; `gather` collects the states of all ranks."""
        loader = self.training.load(
            seed=seed,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            rank=rank,
            ranks=ranks,
            gather=gather,
        )
        self._open.append(loader)
        for line in loader.report():
            _log.info("%s", line)
        return loader

    def last_step(self, feed: Feed, *, max_steps: int, max_epochs: int | None, global_batch_size: int) -> int:
        """Return the step at which training ends: by its steps, its epochs or the examples to see."""
        limits = [max_steps]
        if max_epochs is not None:
            limits.append(feed.steps_of_epochs(max_epochs))
        if (examples := self.training.source.num_examples_to_see) is not None:
            limits.append(-(-examples // global_batch_size))
        return min(limits)

    def held_out_feed(self, *, seed: int, samples: int, micro_batch_size: int, rank: int, ranks: int) -> HeldOutFeed:
        """Return the feed of `samples` held-out samples in a fixed order, as many on every rank.

        Samples of weight 0 fill the last batch of each shape.

        Raises:
            ConfigError: no samples are held out.
        """
        part = self.held_out
        if part is None:
            raise ConfigError("validate: no samples are held out; set validate.share, e.g. 0.01, or validate.urls")
        part = part.first(samples, seed=seed)
        micro_batch_size = max(1, min(micro_batch_size, len(part.rows) // len(part.shapes) // ranks))
        loader = part.load(
            seed=seed,
            global_batch_size=micro_batch_size * ranks,
            micro_batch_size=micro_batch_size,
            rank=rank,
            ranks=ranks,
            whole_epochs=True,
        )
        feed = HeldOutFeed(loader, loader.steps_of_epochs(1))
        self._open.append(feed)
        return feed

    def shown_batch(self, count: int, *, seed: int) -> Batch:
        """Return up to `count` fixed samples of one shape to show, held-out ones where there are any."""
        part = self.held_out or self.training
        count = min(count, int(part.shapes[0]))
        loader = part.load(
            seed=seed, global_batch_size=count, micro_batch_size=count, rank=0, ranks=1, whole_epochs=True
        )
        try:
            return next(loader)[0]
        finally:
            loader.close()

    @property
    def identity(self) -> str:
        """What must be equal on all ranks: digests of the indexes, and how many of their rows take part."""
        parts = [part for part in (self.training, self.held_out) if part is not None]
        return " ".join(f"{part.index.digest}/{len(part.rows)}" for part in parts)

    def record(self) -> None:
        """See `Source.record`."""
        for part in (self.training, self.held_out):
            if part is not None:
                part.source.record()

    def close(self) -> None:
        """End every feed's worker processes."""
        for feed in self._open:
            feed.close()


def open_data_set(
    source: Source, *, share: float | None, held_out: Source | None, transform: SampleTransform | None = None
) -> DataSet:
    """Open `source` and hold samples out of it, or take them from a source of their own.

    Args:
        source: constructed, not opened.
        share: share of the samples held out by a hash of their keys; None = none.
        held_out: another source for held-out samples; None = `share` decides.
        transform: see `Rows`.

    Raises:
        ConfigError: the data is missing or not of its source's form.
        RunError: too much of the data is damaged.
    """
    index = source.open()
    kept = selected(index, source.selectors())
    of_source = partial(Rows, source=source, index=index, transform=transform)
    if held_out is not None:
        other = held_out.open()
        rows = np.flatnonzero(selected(other, held_out.selectors()))
        separate = Rows(source=held_out, index=other, rows=rows, transform=transform)
        return DataSet(of_source(rows=np.flatnonzero(kept)), separate)
    if share is None:
        return DataSet(of_source(rows=np.flatnonzero(kept)), None)
    training, held = (side[kept[side]] for side in split(index, share))
    if len(training) == 0 or len(held) == 0:
        raise ConfigError(
            f"validate.share={share}: of {int(kept.sum())} samples that take part {len(training)} are left to train on"
            f" and {len(held)} held out; both must be at least 1: change the share, or add data"
        )
    return DataSet(of_source(rows=training), of_source(rows=held))
