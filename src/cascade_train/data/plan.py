"""The order of samples: a pure function of (rows, seed, epoch), cut into global batches of one shape.

No reading, no ranks and no workers here. Shards are permuted by (seed, epoch); groups of consecutive shards
form windows; the samples of a window are permuted by (seed, epoch, window). Epochs follow each other without
a gap: what an epoch leaves below one global batch opens the next, so that nothing is lost and the position is
one integer. Permutations sort words of the Philox generator with a stable sort, since NumPy freezes the words
of a bit generator but not the methods built on them.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np

ORDER_VERSION = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One global batch.

    Attributes:
        rows: (G,) int64 rows of the index, in the order of the global batch.
        epochs: (G,) int64 epoch of each.
        height: of every picture of the batch in pixels.
        width: of every picture of the batch in pixels.
    """

    rows: np.ndarray
    epochs: np.ndarray
    height: int
    width: int

    def part(self, start: int, stop: int) -> Step:
        """Return samples [start, stop) of the batch."""
        return Step(rows=self.rows[start:stop], epochs=self.epochs[start:stop], height=self.height, width=self.width)


def permutation(count: int, seed: int, epoch: int, purpose: str) -> np.ndarray:
    """Return a permutation of range(count) as int64; a frozen function of its arguments."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{purpose}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=np.frombuffer(digest, dtype="<u8")).random_raw(count)
    return np.argsort(words, kind="stable")


class Plan:
    """Global batches by position, the same on every rank.

    Args:
        shards: (N,) shard of each row of `rows`, not decreasing.
        rows: (N,) int64 rows of the index that take part, sorted; N >= 1.
        seed: the run's seed.
        global_batch_size: samples of one optimizer step over all ranks.
        window_shards: shards whose samples are mixed with each other.
        image_size: side of the square pictures in pixels.
    """

    def __init__(
        self,
        *,
        shards: np.ndarray,
        rows: np.ndarray,
        seed: int,
        global_batch_size: int,
        window_shards: int,
        image_size: int,
    ) -> None:
        _, first, counts = np.unique(shards, return_index=True, return_counts=True)
        self._rows, self._first, self._counts = rows, first, counts
        self._seed, self._window_shards = seed, window_shards
        self._global_batch_size, self._image_size = global_batch_size, image_size
        self._windows = functools.lru_cache(maxsize=2)(self._lay_out_windows)
        self._window = functools.lru_cache(maxsize=2)(self._permute_window)

    def step(self, position: int) -> Step:
        """Return the global batch at `position`, counted from the run's first."""
        start = position * self._global_batch_size
        stop = start + self._global_batch_size
        parts, epochs = [], []
        while start < stop:
            epoch, offset = divmod(start, len(self._rows))
            part = self._span(epoch, offset, min(len(self._rows), offset + stop - start))
            parts.append(part)
            epochs.append(np.full(len(part), epoch, dtype=np.int64))
            start += len(part)
        size = self._image_size
        return Step(rows=np.concatenate(parts), epochs=np.concatenate(epochs), height=size, width=size)

    def _span(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return samples [start, stop) of the epoch's order, or fewer: none beyond the window of `start`."""
        ends, _ = self._windows(epoch)
        window = int(np.searchsorted(ends, start, side="right"))
        begin = int(ends[window - 1]) if window else 0
        return self._window(epoch, window)[start - begin : stop - begin]

    def _lay_out_windows(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return each window's end in the epoch's order, and its shards."""
        order = permutation(len(self._counts), self._seed, epoch, "shards")
        groups = [order[i : i + self._window_shards] for i in range(0, len(order), self._window_shards)]
        return np.cumsum([self._counts[group].sum() for group in groups]), groups

    def _permute_window(self, epoch: int, window: int) -> np.ndarray:
        shards = self._windows(epoch)[1][window]
        spans = [self._rows[self._first[s] : self._first[s] + self._counts[s]] for s in shards]
        rows = np.concatenate(spans).astype(np.int64)
        return rows[permutation(len(rows), self._seed, epoch, f"window/{window}")]
