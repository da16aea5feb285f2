"""The order of samples: a pure function of (rows, seed, epoch), cut into global batches of one shape.

No reading, no ranks and no workers here. An epoch's samples come in windows, small pieces of which any place is found
without permuting the whole; each joins the queue of its bucket, and as soon as a queue holds a global batch, that is
the next step. No queue is kept: where the k-th batch of a bucket completes follows from counts, so that the position is
one integer and any step is found directly. Permutations are stable sorts of words of the Philox generator: NumPy
freezes these words, not the methods built on them.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cascade_train.data.buckets import BucketTable

ORDER_VERSION = 1


def random_words(count: int, seed: int, epoch: int, purpose: str) -> np.ndarray:
    """(count,) uint64 random words, a frozen function of the arguments; a smaller count gives the first ones."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{purpose}".encode(), digest_size=16).digest()
    words: np.ndarray = np.random.Philox(key=np.frombuffer(digest, dtype="<u8")).random_raw(count)
    return words


def permutation(count: int, seed: int, epoch: int, purpose: str) -> np.ndarray:
    """A permutation of range(count) as int64; a frozen function of its arguments."""
    return np.argsort(random_words(count, seed, epoch, purpose), kind="stable")


class Groups:
    """Rows by bucket, within a bucket by shard: `rows[first_KS[b, s] :][: count_KS[b, s]]`."""

    def __init__(self, rows: np.ndarray, count_KS: np.ndarray) -> None:
        self.rows, self.count_KS = rows, count_KS
        self.first_KS = (np.cumsum(count_KS) - count_KS.ravel()).reshape(count_KS.shape)

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples in each bucket, (K,)."""
        count: np.ndarray = self.count_KS.sum(axis=1)
        return count

    def of_bucket(self, bucket: int) -> np.ndarray:
        """Sorted rows of a bucket."""
        start = int(self.first_KS[bucket, 0])
        return self.rows[start : start + int(self.count_KS[bucket].sum())]


def group(rows: np.ndarray, shard_N: np.ndarray, bucket_N: np.ndarray, buckets: int) -> Groups:
    """Group sorted rows by bucket and by shard, of which `shard_N` has the number among those that occur."""
    shape = (buckets, int(shard_N[-1]) + 1)
    count_KS = np.bincount(bucket_N.astype(np.int64) * shape[1] + shard_N, minlength=shape[0] * shape[1]).reshape(shape)
    return Groups(rows[np.argsort(bucket_N.astype(np.uint16), kind="stable")].astype(np.int64), count_KS)


def shard_numbers(shards: np.ndarray) -> np.ndarray:
    """Number of each row's shard among those that occur, (N,) int64; `shards` does not decrease."""
    return np.cumsum(np.diff(shards, prepend=shards[:1]) != 0)


class Layout:
    """The samples of one epoch by window and bucket: `end_WK` int64 up to the end of each window, `total_K` in all."""

    def __init__(self, groups: Groups, *, seed: int, epoch: int, window_shards: int, replacement: bool) -> None:
        self.epoch = epoch
        self._groups, self._seed = groups, seed
        shards = groups.count_KS.shape[1]
        order = permutation(shards, seed, epoch, "shards")
        if replacement:
            order = (random_words(shards, seed, epoch, "drawn shards") % np.uint64(shards)).astype(np.int64)
        self._order, self._replacement, self._window_shards = order, replacement, window_shards
        starts = np.arange(0, shards, window_shards)
        self.end_WK = np.cumsum(np.add.reduceat(groups.count_KS[:, order], starts, axis=1), axis=1).T
        self.total_K = self.end_WK[-1]
        self._block = functools.lru_cache(maxsize=2 * len(self.total_K))(self._permute_block)

    def span(self, bucket: int, start: int, stop: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows and epochs of samples [start, stop) of a bucket in the epoch's order, in pieces."""
        pieces = []
        ends = self.end_WK[:, bucket]
        while start < stop:
            window = int(np.searchsorted(ends, start, side="right"))
            begin = int(ends[window - 1]) if window else 0
            rows, epochs = self._block(window, bucket)
            pieces.append((rows[start - begin : stop - begin], epochs[start - begin : stop - begin]))
            start = int(ends[window])
        return pieces

    def places(self, window: int, buckets: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Place in a window of each sample, (n,) int64, by its bucket and its number in the bucket's order.

        The buckets' samples are shuffled together; one of an earlier window comes at the beginning, place -1.
        """
        end_K = self.end_WK[window]
        begin_K = self.end_WK[window - 1] if window else np.zeros_like(end_K)
        count_K = end_K - begin_K
        order = permutation(int(count_K.sum()), self._seed, self.epoch, f"window/{window}/buckets")
        bucket_of_place = np.repeat(np.arange(len(count_K), dtype=np.uint16), count_K)[order]
        place_of = np.argsort(bucket_of_place, kind="stable")  # bucket after bucket
        nth = (np.cumsum(count_K) - end_K)[buckets] + samples
        early = samples < begin_K[buckets]
        place: np.ndarray = np.where(early, -1, place_of[np.where(early, 0, nth)])
        return place

    def _permute_block(self, window: int, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of one bucket in one window in their order, and the epoch of each."""
        visits = np.arange(len(self._order))[window * self._window_shards : (window + 1) * self._window_shards]
        first, count = (part[bucket, self._order[visits]] for part in (self._groups.first_KS, self._groups.count_KS))
        rows = np.concatenate([self._groups.rows[f : f + c] for f, c in zip(first, count, strict=True)])
        epochs = np.full(len(rows), self.epoch, dtype=np.int64)
        if self._replacement:
            epochs = np.repeat(self.epoch * len(self._order) + visits, count)
        purpose = f"window/{window}/{bucket}" if bucket else f"window/{window}"
        order = permutation(len(rows), self._seed, self.epoch, purpose)
        return rows[order], epochs[order]


@dataclass(eq=False, kw_only=True)
class Layouts:
    """Every epoch's layout."""

    buckets: BucketTable
    table: np.ndarray  # `Index.table`
    rows: np.ndarray  # (N,) int64 rows of it that take part, sorted; N >= 1
    own: Groups  # the rows by the buckets of their own shapes
    seed: int  # the run's
    window_shards: int  # shards whose samples are mixed with each other
    replacement: bool  # draw shards with replacement, as many as there are
    random_share: float = 0.0  # of the samples, drawn anew each epoch, that go to any entry of the buckets' table

    def __post_init__(self) -> None:
        self.sizes_K2 = self.buckets.sizes_K2
        self._moves = self.random_share > 0.0 and len(self.sizes_K2) > 1
        self.varies = self._moves or self.replacement  # whether epochs differ in how many samples a bucket has
        self._moved = functools.lru_cache(maxsize=3)(self._move)
        self.epoch = functools.lru_cache(maxsize=3)(self._lay_out)

    def _lay_out(self, epoch: int) -> Layout:
        groups = self._moved(epoch) if self._moves else self.own
        return Layout(
            groups, seed=self.seed, epoch=epoch, window_shards=self.window_shards, replacement=self.replacement
        )

    def _move(self, epoch: int) -> Groups:
        """Group the rows after a share of them moved to other buckets."""
        shard_N, bucket_N = self._shard_and_bucket
        bucket_E, count = self.buckets.bucket_E, int(self.rows[-1]) + 1
        draw_N = random_words(count, self.seed, epoch, "bucket/whether")[self.rows] / 2.0**64
        entry_N = random_words(count, self.seed, epoch, "bucket/which")[self.rows] % np.uint64(len(bucket_E))
        bucket_N = np.where(draw_N < self.random_share, bucket_E[entry_N.astype(np.int64)], bucket_N)
        return group(self.rows, shard_N, bucket_N, len(self.sizes_K2))

    @functools.cached_property
    def _shard_and_bucket(self) -> tuple[np.ndarray, np.ndarray]:
        shard_N, width_N, height_N = (self.table[name][self.rows] for name in ("shard", "width", "height"))
        return shard_numbers(shard_N), self.buckets.nearest(width_N, height_N)


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One global batch."""

    rows: np.ndarray  # (G,) int64 rows of the index, in the order of the global batch
    epochs: np.ndarray  # (G,) int64 epoch of each; with replacement, the visit to its shard
    height: int  # of every picture in pixels
    width: int  # of every picture in pixels
    weights: np.ndarray | None = None  # (G,) fp32, 0 for samples that only fill the batch; None = all count

    def part(self, start: int, stop: int) -> Step:
        """Samples [start, stop) of the batch."""
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
    """One epoch cut into steps."""

    layout: Layout  # its samples
    open_K: np.ndarray
    done_W: np.ndarray  # steps that are complete at the end of each window
    rest_K: np.ndarray  # samples of each bucket that are a step of their own at the end

    def steps_before(self, window: int, size: int) -> np.ndarray:
        """How many steps of each bucket are complete when a window begins, (K,)."""
        if window == 0:
            return np.zeros_like(self.open_K)
        return np.maximum(0, (self.layout.end_WK[window - 1] - self.open_K) // size)


@dataclass(eq=False, kw_only=True)
class Plan:
    """Global batches by position, the same on every rank.

    `leftover` decides on samples that fill no global batch of their bucket before the epoch ends: `carry` = they open
    the bucket's next batch, `flush` = they are a step, filled up by samples of weight 0.
    """

    layouts: Layouts  # the epochs' samples
    global_batch_size: int  # samples of one optimizer step over all ranks
    leftover: Literal["carry", "flush"]
    start: Start = Start()  # where the plan begins

    def __post_init__(self) -> None:
        none_K = np.zeros(len(self.layouts.sizes_K2), dtype=np.int64)
        self._taken_K = np.array(self.start.taken, dtype=np.int64) if self.start.taken else none_K
        self._drawn, self._firsts = [none_K], [self.start.position]
        self._epoch = functools.lru_cache(maxsize=3)(self._cut)
        self._window = functools.lru_cache(maxsize=3)(self._complete)

    def step(self, position: int) -> Step:
        """Global batch at `position`, counted from the run's first."""
        number, epoch, window, place = self._find(position)
        if window == len(epoch.done_W):
            bucket = int(np.flatnonzero(epoch.rest_K)[place])
            end, count = int(epoch.layout.total_K[bucket]), int(epoch.rest_K[bucket])
            return self._gather(bucket, number, end - count, end)
        buckets, ends = self._window(number, window)
        return self._gather(int(buckets[place]), number, int(ends[place]) - self.global_batch_size, int(ends[place]))

    def first_step(self, epoch: int) -> int:
        """Position of the first step that is completed in an epoch or after it."""
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
        """How many steps are completed in an epoch."""
        cut = self._epoch(epoch)
        return int(cut.done_W[-1]) + int(np.count_nonzero(cut.rest_K))

    def epoch_of(self, position: int) -> int:
        """Epoch in which the step at `position` is completed."""
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
        """Beginning of the epoch that completes the step at `position`: the same plan from there on."""
        epoch = self.epoch_of(position)
        return Start(position=self.first_step(epoch), epoch=epoch, taken=tuple(self._epoch(epoch).open_K.tolist()))

    def start_at(self, position: int) -> Start:
        """Where a plan with another batch size begins, so that no sample comes twice and none is lost."""
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
        """Epoch and window that complete a step, and its place among theirs; flushed steps follow them all."""
        number = self.epoch_of(position)
        epoch, place = self._epoch(number), position - self.first_step(number)
        window = int(np.searchsorted(epoch.done_W, place, side="right"))
        return number, epoch, window, place - (int(epoch.done_W[window - 1]) if window else 0)

    def _drawn_before(self, epoch: int) -> np.ndarray:
        """How many samples of each bucket come from the plan's first epoch up to this one, (K,)."""
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
        """Bucket of each step that a window completes, in order, and the end of its samples in the epoch."""
        epoch, size = self._epoch(number), self.global_batch_size
        before_K, through_K = (epoch.steps_before(edge, size) for edge in (window, window + 1))
        buckets = np.repeat(np.arange(len(before_K)), through_K - before_K)
        nth = np.arange(len(buckets)) - np.repeat(np.cumsum(through_K - before_K) - through_K, through_K - before_K)
        ends = epoch.open_K[buckets] + (nth + 1) * size
        order = np.argsort(epoch.layout.places(window, buckets, ends - 1), kind="stable")
        return buckets[order], ends[order]

    def _gather(self, bucket: int, epoch: int, start: int, end: int) -> Step:
        """Samples [start, end) of a bucket, counted from its first in `epoch`, as a step."""
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
