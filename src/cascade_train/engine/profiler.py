"""A profiler of a window of optimizer steps, which writes a Chrome trace per rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from cascade_train.errors import RunError


class Profiler:
    """Profiles the steps [start_step, start_step + steps); off when `steps` is None.

    The trace goes to `<directory>/profile/steps_<first>_to_<last>_rank_<r>.json`, for chrome://tracing or Perfetto.
    """

    def __init__(self, *, directory: Path, start_step: int, steps: int | None) -> None:
        self._directory = directory / "profile"
        self._start_step = start_step
        self._end_step = start_step if steps is None else start_step + steps
        self._step = 0
        self._first = 0
        self._running: profile | None = None

    def step(self, ended: int) -> None:
        """Note that an optimizer step ended; starts and ends the window."""
        self._step, upcoming = ended, ended + 1
        if self._running is None and self._start_step <= upcoming < self._end_step:
            self._first = upcoming
            on_device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            activities = [ProfilerActivity.CPU, *on_device]
            self._running = profile(activities=activities, acc_events=True)  # without acc_events, torch 2.11 warns
            self._running.start()
        elif self._running is not None and upcoming >= self._end_step:
            self.close()

    def close(self) -> None:
        """End an open window and write its trace; a RunError where that fails."""
        if self._running is None:
            return
        running, self._running = self._running, None
        running.stop()
        path = self._directory / f"steps_{self._first}_to_{self._step}_rank_{dist.get_rank()}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise RunError(f"the profile {path} could not be written: {error}") from error
