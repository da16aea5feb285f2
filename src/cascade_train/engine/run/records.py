"""Reads the folder of a run, of any age: metrics by step, and folders of samples; skips missing or damaged values."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cascade_train.engine.checkpoint.folder import EVALUATIONS, CheckpointFolder, evaluations
from cascade_train.engine.checkpoint.manifest import whole_manifest
from cascade_train.files.untrusted import read_rows

Metrics = Mapping[str, tuple[Sequence[int], Sequence[float]]]
"""By name, the steps at which a metric was finite, and its values."""


def read_metrics(folder: Path) -> Metrics:
    """Return the numbers of a run, line by line: a file of a million steps is larger than what is kept of it."""
    found: dict[str, tuple[array[int], array[float]]] = defaultdict(lambda: (array("q"), array("d")))
    for row in read_rows(folder / "metrics.jsonl"):
        step: Any = row.get("step")
        for name, value in row.items() if isinstance(step, int) and is_number(step) else ():
            if is_number(value):
                steps, values = found[name]
                steps.append(step)
                values.append(value)
    return dict(found)


def read_evaluations(folder: Path) -> Metrics:
    """Return the latest numbers of a run's evaluations, without those of weights that it has replaced."""
    manifests = [whole_manifest(path) for path in CheckpointFolder(folder / "checkpoints").visible().values()]
    stamps = {manifest.step: manifest.stamp for manifest in manifests if manifest is not None}
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for step, numbers in evaluations(folder / EVALUATIONS, stamps).items():
        for name, value in numbers.items():
            if is_number(step) and is_number(value):
                found[name][step] = value
    return {name: (steps := sorted(values), [values[step] for step in steps]) for name, values in found.items()}


def step_folders(folder: Path) -> dict[int, Path]:
    """Return the folders `step_<n>` in a folder, in the order of their steps."""
    found = {path: path.name.removeprefix("step_") for path in folder.glob("step_*")}
    return dict(sorted((int(step), path) for path, step in found.items() if step.isdecimal()))


def newest_grid(folder: Path, step: int | None = None, name: str = "") -> Path | None:
    """Return the folder of a run's newest grid of samples, up to a step and with a file of a name where these count."""
    found = reversed(step_folders(folder / "samples").items())
    return next((path for at, path in found if (step is None or at <= step) and (path / name).exists()), None)


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a finite number, and no integer of more than 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < (2**63 if isinstance(value, int) else math.inf)
