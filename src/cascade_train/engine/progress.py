"""How a person watches a run: a bar on a terminal, else plain log lines.

Only formatting lives here; the numbers come from the metrics' rows.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)


class Progress:
    """Shows step, speed, time left and loss of a run on rank 0.

    A bar follows every row; without a terminal a line is logged every so many steps.
    """

    def __init__(self, *, max_steps: int, is_main: bool, first_step: int = 0, every_steps: int = 1) -> None:
        """Open the bar where there is a terminal.

        Args:
            max_steps: the step at which the run ends.
            is_main: whether this rank shows anything.
            first_step: the step that the run continues from.
            every_steps: steps between log lines where there is no terminal; the last step always has one.
        """
        self._max_steps = max_steps
        self._is_main = is_main
        self._every_steps = every_steps
        self._shown_step = first_step
        self._shown_at = time.monotonic()
        self._bar: tqdm[None] | None = None
        if is_main and sys.stderr.isatty():
            self._bar = tqdm(total=max_steps, initial=first_step, unit="step", dynamic_ncols=True, file=sys.stderr)

    def update(self, row: Mapping[str, Any]) -> None:
        """Show one step.

        Args:
            row: from `MetricsLog.flush`; `data_wait_share` in [0, 1], if there, is shown too.
        """
        if not self._is_main:
            return
        step: int = row["step"]
        if self._bar is not None:
            self._bar.set_postfix_str(describe_row(row), refresh=False)
            self._bar.update(step - self._bar.n)
        elif step % self._every_steps == 0 or step == self._max_steps:
            log.info("step %d/%d  %s  %s left", step, self._max_steps, describe_row(row), self._time_left(step))
            self._shown_step, self._shown_at = step, time.monotonic()

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _time_left(self, step: int) -> timedelta:
        """Return the time to the end at the pace since the last line, in whole seconds."""
        steps_done = max(step - self._shown_step, 1)
        seconds_per_step = (time.monotonic() - self._shown_at) / steps_done
        return timedelta(seconds=round(seconds_per_step * (self._max_steps - step)))


def describe_row(row: Mapping[str, Any]) -> str:
    """Return a row's loss, speed and share of time spent waiting for data, in one line; what is None is left out."""
    parts = []
    for name, form in (("loss", "loss {:.4f}"), ("images_per_second", "{:.1f} images/s")):
        value = row.get(name)
        if value is not None:
            parts.append(form.format(value))
    share = row.get("data_wait_share")
    if share is not None:
        parts.append(f"data wait {100 * share:.0f} %")
    return "  ".join(parts)
