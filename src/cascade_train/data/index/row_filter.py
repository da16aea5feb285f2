"""Which samples take part, by conditions on their metadata (the json beside picture and caption).

Conditions are parsed in index/row_expression.py; where metadata is read and verdicts are kept is the source's business.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cascade_train.data.index.row_expression import Expression, parse_expression
from cascade_train.files.untrusted import read_json

KEY = "data.row_filters"
VERSION = 1
"""Raised when the same text gets another meaning: verdicts that were kept count no more."""

ABSENT, FAILED, PASSED = 0, 1, 2
"""Verdicts: the sample lacks a key (or readable metadata), does not meet the condition, meets it."""


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """One condition on a sample's metadata.

    Attributes:
        keys: whose values it asks for, in the order of its arguments.
        text: as the user wrote it.
        condition: the same, parsed.
    """

    keys: tuple[str, ...]
    text: str
    condition: Expression

    @property
    def name(self) -> str:
        """Keys and condition, for messages."""
        return f"{', '.join(self.keys)}: {self.text}"

    def verdict(self, metadata: Mapping[str, Any]) -> int:
        """Judge one sample: ABSENT, FAILED or PASSED."""
        if any(key not in metadata for key in self.keys):
            return ABSENT
        return PASSED if self.condition([metadata[key] for key in self.keys]) else FAILED


class RowFilters:
    """All conditions of a run; a sample takes part if it meets every one.

    Attributes:
        filters: in the order given.
    """

    def __init__(self, filters: Sequence[RowFilter]) -> None:
        """Store."""
        self.filters = tuple(filters)

    def __len__(self) -> int:
        return len(self.filters)

    @property
    def identity(self) -> str:
        """16 hex digits that change with any filter, none for no filters."""
        if not self.filters:
            return ""
        text = json.dumps([VERSION, [[each.keys, each.text] for each in self.filters]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def verdicts(self, metadata: bytes | None) -> list[int]:
        """Judge one sample by its json, None where it has none.

        Returns:
            PASSED or ABSENT for the json itself, then a verdict of each filter.
        """
        values = read_metadata(metadata)
        if values is None:
            return [ABSENT] * (1 + len(self.filters))
        return [PASSED, *(each.verdict(values) for each in self.filters)]

    def report(self, verdicts: np.ndarray) -> list[str]:
        """Return lines that say how many samples pass, all filters and each; (N, 1 + filters) verdicts, N >= 1."""
        total, kept = len(verdicts), int(passing(verdicts).sum())
        unread = total - int((verdicts[:, 0] == PASSED).sum())
        lines = [f"{KEY} keep {kept} of {total} samples ({kept / total:.1%}); {unread} have no readable json"]
        for number, each in enumerate(self.filters, start=1):
            passed, absent = (int((verdicts[:, number] == verdict).sum()) for verdict in (PASSED, ABSENT))
            lines.append(f"{KEY} {each.name}: {passed} pass ({passed / total:.1%}), {absent} lack the key")
        return lines


def passing(verdicts: np.ndarray) -> np.ndarray:
    """Return which of (N, 1 + filters) verdicts are passed throughout, (N,) bool."""
    return (verdicts == PASSED).all(axis=1)


def parse_row_filters(given: object, *, key: str = KEY) -> RowFilters:
    """Parse the value of `data.row_filters`.

    Args:
        given: a list of [key, condition], with a list of keys for conditions on several; or a mapping of keys to
            conditions; None = no filters.
        key: of the configuration, for messages.

    Raises:
        ValueError: the value has another form, or a condition is refused.
    """
    if given is None:
        return RowFilters([])
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
    return RowFilters([_row_filter(where, entry) for where, entry in entries])


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
    """Return what a sample's json says, None where there is none or it is no mapping that can be read."""
    try:
        values = None if metadata is None else read_json(metadata)
    except ValueError:
        return None
    return values if isinstance(values, Mapping) else None
