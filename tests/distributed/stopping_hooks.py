"""What happens to ranks while they train: signals, sudden death, and hanging. Hooks of forked.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cascade_train.data.loading.feed import Loader
from cascade_train.engine.faults import stopping
from cascade_train.engine.loop import Trainer
from cascade_train.engine.run.lock import LOCK_NAME


def in_step(number: int, act: Callable[[], Any], *, rank: int) -> Callable[[Path], None]:
    """Return a hook that acts on one rank at the beginning of a step."""

    def hook(out: Path) -> None:
        train_step = Trainer.train_step

        def step(self: Trainer, micro_batches: Any) -> Any:
            if self.step + 1 == number and self.world.rank == rank:
                act()
            return train_step(self, micro_batches)

        Trainer.train_step = step

    return hook


def interrupt_both(out: Path) -> None:
    """Send both ranks Ctrl-C in the seventh step, as a terminal does; what runs in the background would ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for rank in (0, 1):
        in_step(7, lambda: signal.raise_signal(signal.SIGINT), rank=rank)(out)


def run_of(out: Path) -> Path:
    """Return the run directory of what is noted in `<run>_notes` or `<start>@<run>_notes`."""
    return out.with_name(out.name.removesuffix("_notes").rpartition("@")[2])


def hold_rank_one(out: Path) -> None:
    """Let rank 1 hang in the fifth step until rank 0, which holds the run's lock, has ended."""

    def hang() -> None:
        while (run_of(out) / LOCK_NAME).exists():
            time.sleep(0.1)

    in_step(5, hang, rank=1)(out)


def starve_rank_one(out: Path) -> None:
    """Let no data reach rank 1 after the second step, and end it by a signal."""
    stopping.PATIENCE_SECONDS = 0.5
    take = Loader.__next__

    def wait(self: Loader) -> Any:
        if self.position == 2 and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)
            time.sleep(600)
        return take(self)

    Loader.__next__ = wait


terminate_rank_one = in_step(1, lambda: signal.raise_signal(signal.SIGTERM), rank=1)
warn_rank_zero = in_step(4, lambda: signal.raise_signal(signal.SIGUSR1), rank=0)
kill_rank_one = in_step(3, lambda: os.kill(os.getpid(), signal.SIGKILL), rank=1)
