"""The count of samples that could not be read, and where it becomes too much."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cascade_train.errors import RunError
from cascade_train.redaction import LONGEST_NAME, LONGEST_REASON, shortened

if TYPE_CHECKING:
    from cascade_train.batch import Batch, Unreadable

FEW = 3
"""Unreadable samples that no share counts against, while they are at most half of all: few samples say little."""

_log = logging.getLogger(__name__)


class Skipped:
    """Unreadable samples that one rank met.

    Args:
        samples: how many take part; None = nobody knows.
        max_share: of unreadable ones.

    Attributes:
        each: every one once, in the order met, for the reason it had first.
    """

    def __init__(self, samples: int | None, max_share: float) -> None:
        self.each: list[Unreadable] = []
        self._names = set[str]()
        self._samples, self._max_share, self._seen = samples, max_share, 0

    def count(self, batch: Batch) -> None:
        """Note what a batch skipped.

        Before every sample may have been seen once, a few more than the share are allowed.

        Raises:
            RunError: they are more than the share allowed.
        """
        self._seen += len(batch)
        for each in batch.skipped:
            if each.name not in self._names:
                self._names.add(each.name)
                self.each.append(each)
                _log.warning("unreadable sample, another stands in: %s", each)
        all_seen = self._samples is not None and self._seen >= self._samples
        samples = self._samples if all_seen and self._samples is not None else self._seen
        most = most_unreadable(samples, self._max_share) if all_seen else FEW + self._max_share * samples
        if len(self.each) > most:
            listed = by_reason(self.each[:20]) + ("; ..." if len(self.each) > 20 else "")
            raise RunError(
                f"{too_many_text(len(self.each), samples, self._max_share, listed)} Another run leaves them out by"
                " data.quarantine=<this run.dir>."
            )


def most_unreadable(samples: int, max_share: float) -> float:
    """Return how many unreadable samples do not stop a run: a share of them, or a few where that is more."""
    return max(min(FEW, samples // 2), max_share * samples)


def too_many_text(count: int, samples: int, max_share: float, listed: str) -> str:
    """Return that too many samples are unreadable, and the remedies: among them a share that would do."""
    return (
        f"{count} of {samples} samples are unreadable, more than data.max_unreadable_share={max_share:g} allows:"
        f" {listed}. Remove or replace them, or allow as many by"
        f" data.max_unreadable_share={min(1.0, math.ceil(100 * count / samples) / 100):g}."
    )


def by_reason(unreadable: Iterable[Unreadable]) -> str:
    """Return the samples for a message, those of one reason together."""
    names: dict[str, list[str]] = {}
    for each in dict.fromkeys(unreadable):
        names.setdefault(each.reason, []).append(shortened(each.name, LONGEST_NAME))
    return "; ".join(f"{', '.join(same)} ({shortened(reason, LONGEST_REASON)})" for reason, same in names.items())
