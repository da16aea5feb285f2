"""Data workers and the signals that ask a run to stop: the run answers them, and its workers end with it.

A terminal, torchrun and SLURM signal all processes of a run, but without its workers a run could not reach the step on
which all ranks stop.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import signal


def leave_signals_to_the_run(worker: int) -> None:
    """Ignore, in a worker process, what asks the run to stop."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)


@functools.cache
def end_workers_with_this_process() -> None:
    """Have workers that are left when this process exits killed: they would not hear a milder signal."""
    atexit.register(_kill_children)


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()
