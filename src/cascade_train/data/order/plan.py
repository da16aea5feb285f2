"""The order of samples: a pure function of (rows, seed, epoch), cut into global batches of one shape.

No reading, no ranks and no workers here. An epoch's samples come window by window (epoch.py); each joins the queue of
its bucket, and as soon as a queue holds a global batch, that is the next step. No queue is kept: where the k-th batch
of a bucket completes follows from counts, so that the position is one integer and any step is found directly.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cascade_train.data.order.epoch import Layout, Layouts
from cascade_train.errors import ConfigError

ORDER_VERSION = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One global batch."""

    rows: np.ndarray  # (G,) int64 rows of the index, in the order of the global batch
    epochs: np.ndarray  # (G,) int64 epoch of each; with replacement, the visit to its shard
    height: int  # of every picture in pixels
    width: int  # of every picture in pixels
    weights: np.ndarray | None = None  # (G,) fp32, 0 for samples that only fill the batch; None = all count

    def part(self, start: int, stop: int) -> Step:
        """Return samples [start, stop) of the batch."""
        weights = None if self.weights is None else self.weights[start:stop]
        return replace(self, rows=self.rows[start:stop], epochs=self.epochs[start:stop], weights=weights)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a plan begins, for runs whose data or batch size changed."""

    position: int = 0  # global batches handed out before
    epoch: int = 0  # the first epoch whose samples come
    taken: tuple[int, ...] = ()  # its samples handed out before, per bucket; negative = earlier samples wait


@dataclass(frozen=True, eq=False)
class _Epoch:
    """One epoch cut into steps.

    A bucket's first step begins at `open_K`, counted from the bucket's first sample in the epoch: negative where
    samples of earlier epochs wait, positive where the plan begins within the epoch.
    """

    layout: Layout  # its samples
    open_K: np.ndarray
    done_W: np.ndarray  # steps that are complete at the end of each window
    rest_K: np.ndarray  # samples of each bucket that are a step of their own at the end

    def steps_before(self, window: int, size: int) -> np.ndarray:
        """Return how many steps of each bucket are complete when a window begins, (K,)."""
        if window == 0:
            return np.zeros_like(self.open_K)
        return np.maximum(0, (self.layout.end_WK[window - 1] - self.open_K) // size)


@dataclass(eq=False, kw_only=True)
class Plan:
    """Global batches by position, the same on every rank.

    `leftover` decides on samples that fill no global batch of their bucket before the epoch ends: `carry` = they open
    the bucket's next batch, `drop` = they are left out, `flush` = they are a step, filled up by samples of weight 0. A
    ConfigError where all would be dropped.
    """

    layouts: Layouts  # the epochs' samples
    global_batch_size: int  # samples of one optimizer step over all ranks
    leftover: Literal["carry", "drop", "flush"]
    start: Start = Start()  # where the plan begins

    def __post_init__(self) -> None:
        none_K = np.zeros(len(self.layouts.sizes_K2), dtype=np.int64)
        self._taken_K = np.array(self.start.taken, dtype=np.int64) if self.start.taken else none_K
        self._drawn, self._firsts = [none_K], [self.start.position]
        self._epoch = functools.lru_cache(maxsize=3)(self._cut)
        self._window = functools.lru_cache(maxsize=3)(self._complete)
        if self.leftover == "drop" and self.steps_in(self.start.epoch + 1) == 0:
            raise ConfigError(
                "data.leftover=drop would drop every sample: no bucket holds as many as"
                f" train.global_batch_size={self.global_batch_size}. Choose carry or flush, or a smaller batch"
            )

    def step(self, position: int) -> Step:
        """Return the global batch at `position`, counted from the run's first."""
        number, epoch, window, place = self._find(position)
        if window == len(epoch.done_W):
            bucket = int(np.flatnonzero(epoch.rest_K)[place])
            end, count = int(epoch.layout.total_K[bucket]), int(epoch.rest_K[bucket])
            return self._gather(bucket, number, end - count, end)
        buckets, ends = self._window(number, window)
        return self._gather(int(buckets[place]), number, int(ends[place]) - self.global_batch_size, int(ends[place]))

    def first_step(self, epoch: int) -> int:
        """Return the position of the first step that is completed in an epoch or after it."""
        first, position = self.start.epoch, self.start.position
        if epoch <= first:
            return position
        if self.leftover == "carry":
            waiting_K = np.maximum(0, self._drawn_before(epoch) - self._taken_K)
            return position + int((waiting_K // self.global_batch_size).sum())
        if self.layouts.varies:
            while len(self._firsts) <= epoch - first:
                self._firsts.append(self._firsts[-1] + self.steps_in(first + len(self._firsts) - 1))
            return self._firsts[epoch - first]
        return position + self.steps_in(first) + (epoch - first - 1) * self.steps_in(first + 1)

    def steps_in(self, epoch: int) -> int:
        """Return how many steps are completed in an epoch."""
        cut = self._epoch(epoch)
        return int(cut.done_W[-1]) + int(np.count_nonzero(cut.rest_K))

    def epoch_of(self, position: int) -> int:
        """Return the epoch in which the step at `position` is completed."""
        assert position >= self.start.position, "the plan begins later"
        epoch, ahead = self.start.epoch, 1
        while self.first_step(epoch + ahead) <= position:
            epoch, ahead = epoch + ahead, 2 * ahead
        while ahead > 1:
            ahead //= 2
            if self.first_step(epoch + ahead) <= position:
                epoch += ahead
        return epoch

    def epoch_start(self, position: int) -> Start:
        """Return the beginning of the epoch that completes the step at `position`: the same plan from there on."""
        epoch = self.epoch_of(position)
        return Start(position=self.first_step(epoch), epoch=epoch, taken=tuple(self._epoch(epoch).open_K.tolist()))

    def start_at(self, position: int) -> Start:
        """Return where a plan with another batch size begins, so that no sample comes twice and none is lost."""
        number, epoch, window, place = self._find(position)
        taken_K = epoch.open_K + epoch.steps_before(window, self.global_batch_size) * self.global_batch_size
        if window < len(epoch.done_W):
            buckets, _ = self._window(number, window)
            taken_K += np.bincount(buckets[:place], minlength=len(taken_K)) * self.global_batch_size
        else:
            flushed = np.flatnonzero(epoch.rest_K)[:place]
            taken_K[flushed] = epoch.layout.total_K[flushed]
        return Start(position=position, epoch=number, taken=tuple(taken_K.tolist()))

    def _find(self, position: int) -> tuple[int, _Epoch, int, int]:
        """Return epoch and window that complete a step, and its place among theirs; flushed steps follow them all."""
        number = self.epoch_of(position)
        epoch, place = self._epoch(number), position - self.first_step(number)
        window = int(np.searchsorted(epoch.done_W, place, side="right"))
        return number, epoch, window, place - (int(epoch.done_W[window - 1]) if window else 0)

    def _drawn_before(self, epoch: int) -> np.ndarray:
        """Return how many samples of each bucket come from the plan's first epoch up to this one, (K,)."""
        first = self.start.epoch
        if not self.layouts.varies:
            return (epoch - first) * self.layouts.epoch(first).total_K
        while len(self._drawn) <= epoch - first:
            self._drawn.append(self._drawn[-1] + self.layouts.epoch(first + len(self._drawn) - 1).total_K)
        return self._drawn[epoch - first]

    def _cut(self, number: int) -> _Epoch:
        layout, size = self.layouts.epoch(number), self.global_batch_size
        open_K = self._taken_K
        if number > self.start.epoch:
            waiting_K = self._drawn_before(number) - self._taken_K
            carried_K = np.where(waiting_K >= 0, -(waiting_K % size), -waiting_K)
            open_K = carried_K if self.leftover == "carry" else np.zeros_like(open_K)
        done_W = np.maximum(0, (layout.end_WK - open_K) // size).sum(axis=1)
        left_K = np.maximum(0, layout.total_K - open_K) % size
        rest_K = left_K if self.leftover == "flush" else np.zeros_like(left_K)
        return _Epoch(layout, open_K, done_W, rest_K)

    def _complete(self, number: int, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bucket of each step that a window completes, in order, and the end of its samples in the epoch."""
        epoch, size = self._epoch(number), self.global_batch_size
        before_K, through_K = (epoch.steps_before(edge, size) for edge in (window, window + 1))
        buckets = np.repeat(np.arange(len(before_K)), through_K - before_K)
        nth = np.arange(len(buckets)) - np.repeat(np.cumsum(through_K - before_K) - through_K, through_K - before_K)
        ends = epoch.open_K[buckets] + (nth + 1) * size
        order = np.argsort(epoch.layout.places(window, buckets, ends - 1), kind="stable")
        return buckets[order], ends[order]

    def _gather(self, bucket: int, epoch: int, start: int, end: int) -> Step:
        """Return samples [start, end) of a bucket, counted from its first in `epoch`, as a step."""
        while start < 0:
            epoch -= 1
            total = int(self.layouts.epoch(epoch).total_K[bucket])
            start, end = start + total, end + total
        pieces: list[tuple[np.ndarray, np.ndarray]] = []
        while end > 0:
            layout = self.layouts.epoch(epoch)
            total = int(layout.total_K[bucket])
            pieces += layout.span(bucket, start, min(end, total))
            start, end, epoch = max(0, start - total), end - total, epoch + 1
        rows, epochs = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        height, width = self.layouts.sizes_K2[bucket].tolist()
        step, places = Step(rows=rows, epochs=epochs, height=height, width=width), np.arange(self.global_batch_size)
        if len(rows) == len(places):
            return step
        again, weights = places % len(rows), (places < len(rows)).astype(np.float32)  # repeats of weight 0
        return replace(step, rows=rows[again], epochs=epochs[again], weights=weights)
