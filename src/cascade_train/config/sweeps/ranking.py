"""What the runs of a sweep came to, the best first, and the table that is shown of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cascade_train.files.untrusted import read_rows

VALIDATION, LOSS = "validate/loss", "loss"
LOSS_STEPS = 100
"""Steps at the end of a run whose mean loss ranks it; that of one step is noise."""

Result = dict[str, Any]
"""What a run came to: its overrides, directory, exit code, metrics of the last step, and values that may rank it."""

KINDS = {
    "run_dir": str,
    "exit_code": int,
    "values": dict,
    "metrics": dict,
    "overrides": list,
    "best_metric": list | None,
}
"""What a result holds."""


def is_result(found: Result) -> bool:
    """Return whether a mapping with values of `KINDS` is a run's result."""
    mode = (found.get("best_metric") or ["", "min"])[1:]
    return KINDS.keys() - {"best_metric"} <= found.keys() and mode in (["min"], ["max"])


def measured(path: Path, best_metric: str | None) -> Result:
    """Return `metrics`, the last line of a run's `metrics.jsonl` that can be read, and `values` that may rank it."""
    names = sorted({VALIDATION, best_metric or VALIDATION} - {LOSS})
    newest, known = deque[Result](maxlen=LOSS_STEPS), dict[str, Any]()
    for row in read_rows(path):
        newest.append(row)
        known |= {name: row[name] for name in names if row.get(name) is not None}
    losses = [row[LOSS] for row in newest if row.get(LOSS) is not None]
    mean = {LOSS: sum(losses) / len(losses)} if losses else {}
    return {"metrics": newest[-1] if newest else {}, "values": mean | known}


def metric_of(results: Sequence[Result]) -> tuple[str, str]:
    """Return what the runs are ranked by, and whether `min` or `max` is good."""
    chosen = next((result["best_metric"] for result in results if result.get("best_metric")), None)
    if chosen is not None:
        return str(chosen[0]), str(chosen[1])
    return (VALIDATION if any(VALIDATION in result["values"] for result in results) else LOSS), "min"


def ranked(results: Sequence[Result]) -> list[Result]:
    """Return the results, the best first; those that failed, or have no value, last."""
    name, mode = metric_of(results)
    sign = 1 if mode == "min" else -1

    def place(result: Result) -> tuple[bool, bool, float]:
        value = result["values"].get(name)
        return bool(result["exit_code"]), value is None, sign * (value or 0.0)

    return sorted(results, key=place)


def table(results: Sequence[Result]) -> str:
    """Return one line per run with its value, its step and how it ended, below a line that says what ranks them."""
    name, mode = metric_of(results)
    how = f"the mean of its last {LOSS_STEPS} steps" if name == LOSS else "as last measured"
    lines = [f"Runs by {name}, {how}; the {'smallest' if mode == 'min' else 'largest'} is the best:"]
    lines.append(f"{name:>14} {'step':>8}  run")
    for result in ranked(results):
        value, step = result["values"].get(name), result["metrics"].get("step", "-")
        shown = "-" if value is None else f"{value:.6g}"
        lines.append(f"{shown:>14} {step:>8}  {result['run_dir']}{_ended(result)}")
    return "".join(f"{line}\n" for line in lines)


def _ended(result: Result) -> str:
    notes = [f"exit code {result['exit_code']}"] if result["exit_code"] else []
    notes += [result["state"]] if result.get("state") else []
    notes += [f"log {result['log']}"] if result.get("log") else []
    notes += ["from an earlier call"] if result["earlier"] else []
    return f"  ({', '.join(notes)})" if notes else ""
