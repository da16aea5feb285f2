"""How often each sample comes in an epoch where a factor says so, fractions included."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np


def repeat_counts(keys: Sequence[bytes], factor: float) -> np.ndarray:
    """Return how often each of N samples comes: int(factor) times, a share of them once more.

    Which ones come once more is the same in every epoch: those whose keys have the smallest hashes, so that samples
    which are added later move few of the others. 0.4 thus takes the same 40 % every time.

    Args:
        keys: (N,) of the samples.
        factor: at least 0.

    Returns:
        (N,) int64, with the sum round(factor * N).
    """
    counts = np.full(len(keys), math.floor(factor), dtype=np.int64)
    more = round(factor * len(keys)) - int(counts.sum())
    hashes = [hashlib.blake2b(key, digest_size=8).digest() for key in keys]
    order = np.argsort(np.frombuffer(b"".join(hashes), dtype="<u8"), kind="stable")
    counts[order[:more]] += 1
    return counts


def repeated_rows(counts: np.ndarray) -> np.ndarray:
    """Return (sum,) int64 rows, all that come at all, then all that come twice, and so on."""
    passes = range(int(counts.max(initial=0)))
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.flatnonzero(counts > number) for number in passes)])
