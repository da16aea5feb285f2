"""One epoch laid out: which shards share a window, and how many samples of each bucket a window holds.

Windows are small pieces of an epoch, so that any place of it is found without permuting the whole. Permutations are
stable sorts of words of the Philox generator: NumPy freezes these words, not the methods built on them.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np

from cascade_train.data.buckets import BucketTable


def random_words(count: int, seed: int, epoch: int, purpose: str) -> np.ndarray:
    """Return (count,) uint64 random words, a frozen function of the arguments; a smaller count gives the first ones."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{purpose}".encode(), digest_size=16).digest()
    words: np.ndarray = np.random.Philox(key=np.frombuffer(digest, dtype="<u8")).random_raw(count)
    return words


def permutation(count: int, seed: int, epoch: int, purpose: str) -> np.ndarray:
    """Return a permutation of range(count) as int64; a frozen function of its arguments."""
    return np.argsort(random_words(count, seed, epoch, purpose), kind="stable")


class _Groups:
    """Rows by bucket, within a bucket by shard: `rows[first_KS[b, s] :][: count_KS[b, s]]`."""

    def __init__(self, rows: np.ndarray, shard_N: np.ndarray, bucket_N: np.ndarray, shape: tuple[int, int]) -> None:
        self.rows = rows[np.argsort(bucket_N.astype(np.uint16), kind="stable")].astype(np.int64)
        self.count_KS = np.bincount(bucket_N * shape[1] + shard_N, minlength=shape[0] * shape[1]).reshape(shape)
        self.first_KS = (np.cumsum(self.count_KS) - self.count_KS.ravel()).reshape(shape)


class Layout:
    """The samples of one epoch by window and bucket: `end_WK` int64 up to the end of each window, `total_K` in all."""

    def __init__(self, groups: _Groups, *, seed: int, epoch: int, window_shards: int, replacement: bool) -> None:
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
        """Return rows and epochs of samples [start, stop) of a bucket in the epoch's order, in pieces."""
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
        """Return the place in a window of each sample, (n,) int64, by its bucket and its number in the bucket's order.

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
        """Return the rows of one bucket in one window in their order, and the epoch of each.

        With replacement a shard may come twice in an epoch; the number of the visit then stands for the epoch, so that
        its samples make draws of their own each time.
        """
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

    table: BucketTable
    shards: np.ndarray  # (N,) shard of each row of `rows`, not decreasing
    rows: np.ndarray  # (N,) int64 rows of the index that take part, sorted; N >= 1
    width_N: np.ndarray  # of each sample in pixels; 0 = unknown
    height_N: np.ndarray
    seed: int  # the run's
    window_shards: int  # shards whose samples are mixed with each other
    replacement: bool  # draw shards with replacement, as many as there are
    random_share: float = 0.0  # of the samples, drawn anew each epoch, that go to any entry of the table

    def __post_init__(self) -> None:
        self.sizes_K2 = self.table.sizes_K2
        self._moves = self.random_share > 0.0 and len(self.sizes_K2) > 1
        self.varies = self._moves or self.replacement  # whether epochs differ in how many samples a bucket has
        self.nearest_N = self.table.nearest(self.width_N, self.height_N)  # the bucket of each sample's own shape
        self.enlarged_N = self.table.enlargement(self.nearest_N, self.width_N, self.height_N)  # 0 = unknown
        self._shard_N = np.cumsum(np.diff(self.shards, prepend=self.shards[0]) != 0)
        self._groups = functools.lru_cache(maxsize=3)(self._group)
        self.epoch = functools.lru_cache(maxsize=3)(self._lay_out)

    def _lay_out(self, epoch: int) -> Layout:
        groups = self._groups(epoch if self._moves else 0)
        return Layout(
            groups, seed=self.seed, epoch=epoch, window_shards=self.window_shards, replacement=self.replacement
        )

    def _group(self, epoch: int) -> _Groups:
        bucket_N, bucket_E = self.nearest_N, self.table.bucket_E
        if self._moves:
            count = int(self.rows[-1]) + 1
            draw_N = random_words(count, self.seed, epoch, "bucket/whether")[self.rows] / 2.0**64
            entry_N = random_words(count, self.seed, epoch, "bucket/which")[self.rows] % np.uint64(len(bucket_E))
            bucket_N = np.where(draw_N < self.random_share, bucket_E[entry_N.astype(np.int64)], bucket_N)
        return _Groups(self.rows, self._shard_N, bucket_N, (len(self.sizes_K2), int(self._shard_N[-1]) + 1))
