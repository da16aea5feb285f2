"""The lines of a file with one JSON object per step, such as `metrics.jsonl`: which are whole, cut, or lost."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from cascade_train.files.durable import write_durably

log = logging.getLogger(__name__)


def cut_lines(path: Path, step: int) -> None:
    """Drop the lines after a step, and torn ones."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, start=1):
        line_step = step_of(line)
        if line_step is None:
            log.warning("line %d of %s is torn and dropped", number, path)
        elif line_step <= step:
            kept.append(line)
    if kept != lines:
        write_durably(path, "".join(kept))


def missing_steps(path: Path, *, first: int | None, last: int) -> list[int]:
    """Return the steps up to `last` that have no whole line, from `first`; None = from the first that has one."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
    found = {step for line in lines if (step := step_of(line)) is not None}
    begin = min(found, default=last) if first is None else first
    return [step for step in range(begin, last + 1) if step not in found]


def step_of(line: str) -> int | None:
    """Return the step of a line; None where it is torn."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_whole = line.endswith("\n") and isinstance(row, dict) and isinstance(row.get("step"), int)
    return row["step"] if is_whole else None
