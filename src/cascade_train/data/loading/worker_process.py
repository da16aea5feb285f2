"""Data workers as processes: what they leave to the run that they belong to, and that they end with it.

A terminal, torchrun and SLURM signal all processes of a run, but without its workers a run could not reach the step on
which all ranks stop. What the run made before a fork is the run's to destroy: a process group that the collector of a
forked worker finds unused waits for threads that are not there, for ever.
"""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import signal

from cascade_train.signals import STOP_SIGNALS


def begin_worker(worker: int) -> None:
    """Ignore, in a worker process, what asks the run to stop, and collect no object of before the fork."""
    gc.freeze()
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)


@functools.cache
def end_workers_with_this_process() -> None:
    """Have workers that are left when this process exits killed: they would not hear a milder signal."""
    atexit.register(_kill_children)


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()
