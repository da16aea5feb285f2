"""The progress of a run: a bar on a terminal, above which log messages appear, else log lines."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

log = logging.getLogger(__name__)

_BAR = "{percentage:3.0f} %|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Progress:
    """Shows step, loss, speed, time left and share of time spent waiting for data, on rank 0.

    `every_steps`: steps between log lines where there is no terminal; None = only the last step's.
    """

    def __init__(self, *, max_steps: int, is_main: bool, every_steps: int | None = 1) -> None:
        self._max_steps = max_steps
        self._is_main = is_main
        self._every_steps = every_steps
        self._bar: tqdm[None] | None = None
        if is_main and sys.stderr.isatty() and _has_width(sys.stderr):
            self._bar = tqdm(total=max_steps, bar_format=_BAR, dynamic_ncols=True, file=sys.stderr)
            self._logging_above = ExitStack()
            self._logging_above.enter_context(logging_redirect_tqdm())

    def update(self, row: Mapping[str, Any]) -> None:
        """Show one step, a row of `MetricsLog.flush`."""
        if not self._is_main:
            return
        step: int = row["step"]
        if self._bar is not None:
            self._bar.set_postfix_str(describe_row(row, self._max_steps), refresh=False)
            self._bar.update(step - self._bar.n)
        elif step and (step == self._max_steps or (self._every_steps is not None and step % self._every_steps == 0)):
            log.info("step %d/%d  %s", step, self._max_steps, describe_row(row, self._max_steps))
        if measured := describe_validation(row):
            log.info("step %d/%d  %s", step, self._max_steps, measured)

    def close(self) -> None:
        """Close the bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            self._logging_above.close()


def _has_width(terminal: TextIO) -> bool:
    """Whether a terminal knows its width; one that was never sized shows no bar."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns > 0
    except OSError:  # a stand-in
        return True


def describe_validation(row: Mapping[str, Any]) -> str:
    """Measures of a validation, without those of single noise levels; empty where the row has none."""
    shown = {name: value for name, value in row.items() if name.startswith("validate") and "_logsnr_" not in name}
    return "  ".join(f"{name} {'not finite' if value is None else f'{value:.4f}'}" for name, value in shown.items())


def describe_row(row: Mapping[str, Any], max_steps: int) -> str:
    """A row's loss, images/s, time left and share of time spent waiting for data, as far as known."""
    loss, speed, share = (row.get(name) for name in ("loss", "images_per_second", "data_wait_share"))
    parts = []
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    if speed is not None:
        images_left = (max_steps - row["step"]) * row["samples_seen"] / row["step"]
        parts += [f"{speed:.1f} images/s", f"{timedelta(seconds=round(images_left / speed))} left"]
    if share is not None:
        parts.append(f"data wait {100 * share:.0f} %")
    return "  ".join(parts)
