"""Which samples take part, by conditions on their metadata (the json beside picture and caption, or columns).

Conditions are parsed in row_expression.py; sources read metadata and keep verdicts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cascade_train.data.index.row_expression import Expression, parse_expression
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import read_json

KEY = "data.row_filters"
VERSION = 1
"""Raised when the same text gets another meaning: cached verdicts are then made anew."""

ABSENT, FAILED, PASSED = 0, 1, 2
"""Verdicts: the sample lacks a key (or readable metadata), does not meet the condition, meets it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """One condition on a sample's metadata."""

    keys: tuple[str, ...]  # whose values are the condition's arguments, in this order
    text: str  # as the user wrote it
    condition: Expression  # the same, parsed

    @property
    def name(self) -> str:
        """Keys and condition, for messages."""
        return f"{', '.join(self.keys)}: {self.text}"

    def verdict(self, metadata: Mapping[str, Any]) -> int:
        """Judge one sample: ABSENT, FAILED or PASSED."""
        if any(key not in metadata for key in self.keys):
            return ABSENT
        return PASSED if self.condition([metadata[key] for key in self.keys]) else FAILED


@dataclass(frozen=True)
class RowFilters:
    """All conditions of a run, in the order given; a sample takes part if it meets every one."""

    filters: tuple[RowFilter, ...] = ()

    def __len__(self) -> int:
        return len(self.filters)

    @property
    def identity(self) -> str:
        """16 hex digits that change with any filter, none for no filters."""
        if not self.filters:
            return ""
        text = json.dumps([VERSION, [[each.keys, each.text] for each in self.filters]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def judge(self, values: Mapping[str, Any] | None) -> list[int]:
        """Return PASSED or ABSENT for a sample's values, None if they cannot be read, then each filter's verdict."""
        if values is None:
            return [ABSENT] * (1 + len(self))
        return [PASSED, *(each.verdict(values) for each in self.filters)]

    def verdicts(self, metadata: bytes | None) -> list[int]:
        """Judge one sample by its json, None where it has none. See `judge`."""
        return self.judge(read_metadata(metadata))

    def kept(self, verdicts: np.ndarray) -> np.ndarray:
        """Return which of (N, 1 + filters) verdicts meet every filter, (N,) bool; log how many, at least one."""
        kept = passing(verdicts)
        total, unread = len(verdicts), int((verdicts[:, 0] != PASSED).sum())
        report = [f"{KEY} keep {kept.sum()} of {total} samples ({kept.mean():.1%}); {unread} have no readable json"]
        for each, verdict_N in zip(self.filters, verdicts[:, 1:].T, strict=True):
            passed, absent = (int((verdict_N == verdict).sum()) for verdict in (PASSED, ABSENT))
            report.append(f"{KEY} {each.name}: {passed} pass ({passed / total:.1%}), {absent} lack the key")
        for line in report:
            _log.info("%s", line)
        if not kept.any():
            raise ConfigError("row_filters leave no sample, so nothing can train; relax them. " + "; ".join(report))
        return kept


def passing(verdicts: np.ndarray) -> np.ndarray:
    """Return which of (N, 1 + filters) verdicts are all PASSED, (N,) bool."""
    return (verdicts == PASSED).all(axis=1)


def parse_row_filters(given: object, *, key: str = KEY) -> RowFilters:
    """Parse the value of `data.row_filters`, or of another `key` in its form; else a ValueError.

    It is a list of [key, condition], with a list of keys for conditions on several; or a mapping of keys to conditions;
    None = no filters.
    """
    if given is None:
        return RowFilters()
    entries: Iterable[tuple[str, Any]]
    if isinstance(given, Mapping):
        entries = [(f"{key}.{name}", [name, condition]) for name, condition in given.items()]
    elif isinstance(given, list):
        entries = [(f"{key}[{number}]", entry) for number, entry in enumerate(given)]
    else:
        raise ValueError(
            f"{key}={given} must be a list of [key, condition] or a mapping of keys to conditions; as in"
            f" '{key}=[[score,\"lambda s: s > 4.5\"]]'"
        )
    return RowFilters(tuple(_row_filter(where, entry) for where, entry in entries))


def _row_filter(where: str, entry: Any) -> RowFilter:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
        raise ValueError(
            f"{where}={entry} is not a pair of a key and a condition; write [score, 'lambda s: s > 4.5'], or"
            " [[width, height], 'lambda w, h: w * h >= 600 ** 2'], the condition always in quotes"
        )
    keys = entry[0] if isinstance(entry[0], list) else [entry[0]]
    if not keys or not all(isinstance(key, str) and key for key in keys):
        raise ValueError(f"{where}: {entry[0]!r} is not the name of a key in the samples' json, nor a list of names")
    return RowFilter(keys=tuple(keys), text=entry[1], condition=parse_expression(entry[1], keys, where=where))


def read_metadata(metadata: bytes | None) -> Mapping[str, Any] | None:
    """Return a sample's json as a mapping; None where there is none that can be read."""
    try:
        values = None if metadata is None else read_json(metadata)
    except ValueError:
        return None
    return values if isinstance(values, Mapping) else None
