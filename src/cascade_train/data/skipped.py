"""The count of samples that could not be read, and where it becomes too much."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from cascade_train.batch import Batch, Unreadable
from cascade_train.errors import RunError

_log = logging.getLogger(__name__)


class Skipped:
    """Unreadable samples that one rank met.

    Args:
        samples: how many take part; None = nobody knows.
        max_share: of unreadable ones.

    Attributes:
        each: every one once, in the order met.
    """

    def __init__(self, samples: int | None, max_share: float) -> None:
        self.each: list[Unreadable] = []
        self._samples, self._max_share, self._seen = samples, max_share, 0

    def count(self, batch: Batch) -> None:
        """Note what a batch skipped.

        Before every sample may have been seen once, three more are allowed, since few samples say little.

        Raises:
            RunError: they are more than the share allowed.
        """
        self._seen += len(batch)
        for each in batch.skipped:
            if each not in self.each:
                self.each.append(each)
                _log.warning("unreadable sample, another stands in: %s", each)
        all_seen = self._samples is not None and self._seen >= self._samples
        share = self._max_share * (self._samples if all_seen and self._samples is not None else self._seen)
        if len(self.each) > (max(1.0, share) if all_seen else share + 3):
            listed = by_reason(self.each[:20]) + ("; ..." if len(self.each) > 20 else "")
            raise RunError(
                f"{len(self.each)} unreadable samples among {self._seen} read, more than {self._max_share:.0%}:"
                f" {listed}; remove or replace them, or start another run with data.quarantine=<this run.dir>"
            )


def by_reason(unreadable: Iterable[Unreadable]) -> str:
    """Return the samples for a message, those of one reason together."""
    names: dict[str, list[str]] = {}
    for each in dict.fromkeys(unreadable):
        names.setdefault(each.reason, []).append(each.name)
    return "; ".join(f"{', '.join(same)} ({reason})" for reason, same in names.items())
