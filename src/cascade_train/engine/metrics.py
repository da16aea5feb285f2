"""The metrics of a run: one JSON object per optimizer step in `metrics.jsonl`, and which lines are whole, cut or lost.

Values stay on the device until `flush`, the one host sync.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cascade_train.errors import RunError, unwritten
from cascade_train.files.durable import append_durably, replacing
from cascade_train.files.untrusted import read_lines

log = logging.getLogger(__name__)

Row = dict[str, Any]
"""One line of the file: an int `step` and `samples_seen`, then numbers; None = not finite, or not known yet.

That of step 0 has a validation and no loss.
"""


class MetricsLog:
    """Collects the metrics of a run and appends them to a file on rank 0.

    All steps of a flush have the same `images_per_second`, images over seconds since the flush before, and the same
    `data_wait_share`, the share of those seconds spent `waiting` for data. The clock starts with `start`, else at the
    first record, so that set-up is never counted.
    """

    def __init__(self, path: Path, *, is_main: bool) -> None:
        self._path = path
        self._is_main = is_main
        self._pending: list[tuple[int, int, dict[str, Tensor | float]]] = []
        self._seconds: float | None = None
        self._samples: int | None = None
        self._waited: float | None = None

    def start(self, samples_seen: int) -> None:
        """Start the clock, right before a step; `samples_seen` counts those before a resume too."""
        self._seconds = time.perf_counter()
        self._samples = samples_seen
        self._waited = None if self._waited is None else 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent inside as waiting for data. Does not sync with the device."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._waited = (self._waited or 0.0) + time.perf_counter() - begun

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent inside out of `images_per_second`: checkpoints, sample images."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            if self._seconds is not None:
                self._seconds += time.perf_counter() - begun

    def record(self, step: int, samples_seen: int, values: Mapping[str, Tensor | float]) -> None:
        """Keep the numbers or plain () tensors of one optimizer step, equal on all ranks. Does not sync."""
        for name, value in values.items():
            if isinstance(value, DTensor) or (isinstance(value, Tensor) and value.ndim != 0):
                raise AssertionError(f"metric {name} must be a plain () tensor, not {type(value)} {tuple(value.shape)}")
        if self._samples is None:
            self.start(samples_seen)
        if self._is_main:
            # Copies: the next step may write into the same memory.
            kept = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in values.items()}
            self._pending.append((step, samples_seen, kept))

    def flush(self) -> list[Row]:
        """Bring the records since the last flush to the host, append them to the file, and return them, on rank 0."""
        if not self._pending:
            return []
        pending, self._pending = self._pending, []
        on_host = _to_host([values for _, _, values in pending])
        speeds = self._speeds(pending[-1][1])
        rows: list[Row] = []
        for (step, seen, _), numbers in zip(pending, on_host, strict=True):
            numbers |= speeds if step else {}  # before the first step there is validation alone
            finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
            rows.append({"step": step, "samples_seen": seen, **finite})
        try:
            append_durably(self._path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        except FileNotFoundError as error:
            raise RunError(
                f"{self._path.parent} is gone: it was removed or moved while the run went on. "
                "Put it back, and the same command continues from its newest checkpoint; else it starts over."
            ) from error
        except OSError as error:
            raise RunError(f"{unwritten(self._path, error)}. Free space there; the same command continues.") from error
        return rows

    def _speeds(self, samples_seen: int) -> dict[str, float]:
        """Speeds since the last flush; starts the next interval. NaN when no step was timed."""
        if self._seconds is None or self._samples is None:
            raise AssertionError("the clock starts with the first record")
        images, seconds = samples_seen - self._samples, time.perf_counter() - self._seconds
        waited, timed = self._waited, images > 0 and seconds > 0
        self.start(samples_seen)
        speeds = {"images_per_second": images / seconds if timed else math.nan}
        if waited is not None:
            speeds["data_wait_share"] = min(1.0, waited / seconds) if timed else math.nan
        return speeds


def _to_host(records: Sequence[Mapping[str, Tensor | float]]) -> list[dict[str, float]]:
    """Turn tensors into numbers with one transfer per device and dtype, keeping each record's order of names."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, str, Tensor]]] = {}
    for row, record in enumerate(records):
        for name, value in record.items():
            if isinstance(value, Tensor):
                groups.setdefault((value.device, value.dtype), []).append((row, name, value))
    numbers: list[dict[str, float]] = [
        {name: math.nan if isinstance(value, Tensor) else value for name, value in record.items()} for record in records
    ]
    for members in groups.values():
        on_host = torch.stack([tensor for _, _, tensor in members]).tolist()
        for (row, name, _), number in zip(members, on_host, strict=True):
            numbers[row][name] = number
    return numbers


def cut_lines(path: Path, step: int) -> None:
    """Drop the lines of a file with one JSON object per step after a step, and torn ones."""
    if all(line_step is not None and line_step <= step for line_step, _ in _by_step(path)):
        return
    with replacing(path) as beside, beside.open("w", encoding="utf-8") as kept:
        for number, (line_step, line) in enumerate(_by_step(path), start=1):
            if line_step is None:
                log.warning("line %d of %s is torn and dropped", number, path)
            elif line_step <= step:
                kept.write(line)


def _by_step(path: Path) -> Iterator[tuple[int | None, str]]:
    """Yield the step of each line, and the line, never all at once: there may be millions."""
    texts = (line.decode(errors="replace") for line in read_lines(path))
    return ((step_of(text), text) for text in texts)


def step_of(line: str) -> int | None:
    """Step of a line; None where it is torn."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_whole = line.endswith("\n") and isinstance(row, dict) and isinstance(row.get("step"), int)
    return row["step"] if is_whole else None
