"""Which rows of an index take part at all, decided before anything is planned, so that all ranks agree.

A selector judges rows by the index alone; what it needs beyond that it reads when it is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from cascade_train.data.index.rows import Index
from cascade_train.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Selection:
    """One selector's verdict.

    Attributes:
        kept: (N,) bool, which rows of the index may take part.
        reason: why the others may not, the end of a sentence: "are enlarged by more than data.buckets.max_upscale=2".
    """

    kept: np.ndarray
    reason: str


RowSelector = Callable[[Index], Selection]


def selected(index: Index, selectors: Iterable[RowSelector]) -> np.ndarray:
    """Return (N,) bool, which rows every selector keeps; log how many each leaves out.

    Raises:
        ConfigError: no row is left.
    """
    kept = np.ones(len(index), dtype=bool)
    reports = []
    for selection in (selector(index) for selector in selectors):
        dropped = int((~selection.kept).sum())
        if dropped:
            reports.append(f"{dropped} of {len(index)} samples {selection.reason}")
            _log.info("Left out: %s.", reports[-1])
        kept &= selection.kept
    if not kept.any():
        raise ConfigError(f"data: no sample is left to read: {'; '.join(reports)}. Relax what leaves them out.")
    return kept
