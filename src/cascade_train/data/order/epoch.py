"""One epoch laid out: which shards share a window, and how many samples of each bucket a window holds.

Windows are small pieces of an epoch, so that any place of it is found without permuting the whole. Permutations are
stable sorts of words of the Philox generator: NumPy freezes these words, not the methods built on them.
"""

from __future__ import annotations

import functools
import hashlib

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


class Assignment:
    """Which bucket each sample is in.

    Args:
        table: the buckets.
        width_N: of each sample in pixels; 0 = unknown.
        height_N: of each sample in pixels; 0 = unknown.
        rows: (N,) the samples' rows of the index.
        random_share: of the samples, drawn anew each epoch, that go to any entry of the table.
        seed: of these draws.

    Attributes:
        sizes_K2: (K, 2) int64, height and width of each bucket in pixels.
        varies: whether epochs differ.
        nearest_N: (N,) int64, the bucket of each sample's own shape.
        enlarged_N: (N,) scale of each sample there; 0 = unknown.
    """

    def __init__(
        self,
        table: BucketTable,
        *,
        width_N: np.ndarray,
        height_N: np.ndarray,
        rows: np.ndarray,
        random_share: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.sizes_K2 = table.sizes_K2
        self.varies = random_share > 0.0 and len(table.sizes_K2) > 1
        self.nearest_N = table.nearest(width_N, height_N)
        self.enlarged_N = table.enlargement(self.nearest_N, width_N, height_N)
        self._rows, self._bucket_E = rows, table.bucket_E
        self._random_share, self._seed = random_share, seed

    def of_epoch(self, epoch: int) -> np.ndarray:
        """Return the (N,) int64 bucket of each sample in an epoch."""
        if not self.varies:
            return self.nearest_N
        count = int(self._rows[-1]) + 1
        draw_N = random_words(count, self._seed, epoch, "bucket/whether")[self._rows] / 2.0**64
        entry_N = random_words(count, self._seed, epoch, "bucket/which")[self._rows] % np.uint64(len(self._bucket_E))
        return np.where(draw_N < self._random_share, self._bucket_E[entry_N.astype(np.int64)], self.nearest_N)


class _Groups:
    """Rows by bucket, within a bucket by shard: `rows[first_KS[b, s] :][: count_KS[b, s]]`."""

    def __init__(self, rows: np.ndarray, shard_N: np.ndarray, bucket_N: np.ndarray, shape: tuple[int, int]) -> None:
        self.rows = rows[np.argsort(bucket_N.astype(np.uint16), kind="stable")].astype(np.int64)
        self.count_KS = np.bincount(bucket_N * shape[1] + shard_N, minlength=shape[0] * shape[1]).reshape(shape)
        self.first_KS = (np.cumsum(self.count_KS) - self.count_KS.ravel()).reshape(shape)


class Layout:
    """The samples of one epoch by window and bucket.

    Attributes:
        epoch: its number.
        end_WK: (W, K) int64, samples of each bucket up to the end of each window.
        total_K: (K,) int64, samples of each bucket.
    """

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


class Layouts:
    """Every epoch's layout.

    Args:
        shards: (N,) shard of each row of `rows`, not decreasing.
        rows: (N,) int64 rows of the index that take part, sorted; N >= 1.
        assignment: to buckets.
        seed: the run's seed.
        window_shards: shards whose samples are mixed with each other.
        replacement: draw shards with replacement, as many as there are.

    Attributes:
        sizes_K2: (K, 2) int64, height and width of each bucket in pixels.
        varies: whether epochs differ in how many samples a bucket has.
    """

    def __init__(
        self,
        *,
        shards: np.ndarray,
        rows: np.ndarray,
        assignment: Assignment,
        seed: int,
        window_shards: int,
        replacement: bool,
    ) -> None:
        self.sizes_K2, self.varies = assignment.sizes_K2, assignment.varies or replacement
        self._rows, self._assignment = rows, assignment
        self._shard_N = np.cumsum(np.diff(shards, prepend=shards[0]) != 0)
        self._seed, self._window_shards, self._replacement = seed, window_shards, replacement
        self._groups = functools.lru_cache(maxsize=3)(self._group)
        self.epoch = functools.lru_cache(maxsize=3)(self._lay_out)

    def _lay_out(self, epoch: int) -> Layout:
        groups = self._groups(epoch if self._assignment.varies else 0)
        return Layout(
            groups,
            seed=self._seed,
            epoch=epoch,
            window_shards=self._window_shards,
            replacement=self._replacement,
        )

    def _group(self, epoch: int) -> _Groups:
        shape = (len(self.sizes_K2), int(self._shard_N[-1]) + 1)
        return _Groups(self._rows, self._shard_N, self._assignment.of_epoch(epoch), shape)
