"""Row filters applied to samples whose metadata is at hand. What a filter is lives in index/row_filter.py."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from cascade_train.data.index.row_filter import ABSENT, PASSED, RowFilters, passing
from cascade_train.errors import ConfigError

_log = logging.getLogger(__name__)


def judged(filters: RowFilters, values: Mapping[str, Any] | None) -> list[int]:
    """Return the verdicts on one sample by its values, None where it has none; see `RowFilters.verdicts`."""
    if values is None:
        return [ABSENT] * (1 + len(filters))
    return [PASSED, *(each.verdict(values) for each in filters.filters)]


def passing_rows(filters: RowFilters, verdicts: np.ndarray) -> np.ndarray:
    """Return which of (N, 1 + filters) verdicts are passed throughout, (N,) bool, and log how many are.

    Raises:
        ConfigError: none is.
    """
    report = filters.report(verdicts)
    for line in report:
        _log.info("%s", line)
    kept = passing(verdicts)
    if not kept.any():
        raise ConfigError("row_filters leave no sample, so nothing can train; relax them. " + "; ".join(report))
    return kept
