"""Samples that another run found unreadable, left out of this one before anything is planned.

A run writes its list as it goes (engine/faults/unreadable.py); nothing is written here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path

import numpy as np

from cascade_train.data.index.rows import Index
from cascade_train.data.index.selection import Selection
from cascade_train.errors import ConfigError

KEY = "data.quarantine"
FOLDER = "quarantine"
"""Folder of a run that holds its list, one file per rank."""

_log = logging.getLogger(__name__)


def read_quarantine(path: Path) -> set[str]:
    """Return the names of samples in a list.

    Args:
        path: a run directory, its `quarantine` folder, or one file of lines `{"sample": "train.tar:0001", ...}`.

    Raises:
        ConfigError: there is no such list, or a line of it names no sample.
    """
    files = [path] if path.is_file() else sorted((path / FOLDER).glob("*.jsonl")) or sorted(path.glob("*.jsonl"))
    if not files or (path / "metrics.jsonl") in files:
        raise ConfigError(
            f"{KEY}={path} is no list of unreadable samples, nor a run that met one ({path / FOLDER}/*.jsonl): null"
            " leaves nothing out"
        )
    return {name for file in files for name in _names(file)}


def _names(file: Path) -> list[str]:
    names = []
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            names.append(str(json.loads(line)["sample"]))
        except (ValueError, LookupError, TypeError) as error:
            if number == len(lines):  # nothing behind the last end of line, or a run was killed while it wrote
                break
            raise ConfigError(
                f'{KEY}: line {number} of {file} names no sample, as {{"sample": "train.tar:0001"}} does: mend it, or'
                " remove the line"
            ) from error
    return names


def quarantine_selection(names: Collection[str], index: Index) -> Selection:
    """Return which samples are not in a list, and say how many of it are not in the data.

    Args:
        names: of samples, as `Index.name` has them.
        index: the samples.
    """
    keys = {
        name[start + 1 :].encode(errors="surrogateescape")
        for name in names
        for start, mark in enumerate(name)
        if mark == ":"
    }
    candidates = np.flatnonzero(np.isin(index.keys, list(keys))) if keys else np.zeros(0, dtype=np.int64)
    found = {row: index.name(row) for row in candidates.tolist() if index.name(row) in names}
    kept = np.ones(len(index), dtype=bool)
    kept[list(found)] = False
    missing = len(names) - len(set(found.values()))
    if missing:
        _log.info("%s: %d of %d names are not in this data.", KEY, missing, len(names))
    return Selection(kept=kept, reason=f"are listed in {KEY}")
