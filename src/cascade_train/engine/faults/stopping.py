"""Orderly ends before the last step: signals (signals.py), and a limit of time.

What is saved at such an end, and what is said, is the loop's business.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

from cascade_train.distributed.consensus import from_every_rank
from cascade_train.engine.faults.stop_vote import Ballot, Motion
from cascade_train.errors import STOPPED
from cascade_train.signals import Signals


class TimeLimit:
    """A limit of time, reached while one more step and a save still fit into it.

    What they take is estimated: a step as the longest of the last `REMEMBERED` (the first of all sets things up and
    does not count), twice since a vote takes a step; a save as the longest so far, and before there was one as the time
    from the start of the process to the end of the first step.
    """

    REMEMBERED = 100

    def __init__(self, *, max_hours: float | None) -> None:
        """Store; `max_hours` counts from `seconds_since_start`, None = no limit."""
        self._limit_seconds = None if max_hours is None else 3600.0 * max_hours
        self._steps: deque[float] = deque(maxlen=self.REMEMBERED)
        self._save_seconds = 0.0
        self._set_up_seconds = 0.0
        self._begun: float | None = None
        self._is_reached = False

    def end_step(self) -> None:
        """Note that a step, with all that follows it, has ended and the next begins."""
        now = time.monotonic()
        if self._begun is None:
            self._set_up_seconds = seconds_since_start()
        else:
            self._steps.append(now - self._begun)
        self._begun = now

    def end_save(self, seconds: float) -> None:
        """Note how long the loop was held up by a save, which is no part of its step."""
        self.note_save(seconds)
        if self._begun is not None:
            self._begun += seconds

    def note_save(self, seconds: float) -> None:
        """Note how long a save took, in the loop or beside it."""
        self._save_seconds = max(self._save_seconds, seconds)

    def is_reached(self) -> bool:
        """Return whether another step and a save might not fit any more; once reached, it stays so."""
        if self._limit_seconds is not None and not self._is_reached:
            needed = 2 * max(self._steps, default=0.0) + (self._save_seconds or self._set_up_seconds)
            self._is_reached = seconds_since_start() + needed >= self._limit_seconds
        return self._is_reached


class Stopping:
    """Whether the ranks stop before the last step: this rank's signals and time limit, put to the vote.

    Attributes:
        limit: of time.
    """

    def __init__(self, *, signals: Signals, limit: TimeLimit, ballot: Ballot) -> None:
        """Store."""
        self.limit = limit
        self._signals = signals
        self._ballot = ballot

    def vote(self, *, save_failed: bool, save_seconds: float) -> Motion:
        """Put to the vote, at the end of a step, what this rank wants; return what is carried. Collective.

        Args:
            save_failed: the save in flight has failed on this rank.
            save_seconds: the longest time that a save took beside the loop, so far.
        """
        self.limit.end_step()
        self.limit.note_save(save_seconds)
        wanted = Motion.SAVE_FAILED if save_failed else Motion(0)
        return self._ballot.cast(wanted if self._reason() is None else wanted | Motion.STOP)

    def agreed_reason(self) -> str:
        """Return why some rank asked for the stop that was carried. Collective."""
        reasons = from_every_rank(self._reason)
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        return reason if reasons.count(reason) == len(reasons) else f"{reason} on rank {rank}"

    def _reason(self) -> str | None:
        if self._signals.first is not None:
            return self._signals.first.name
        return "run.max_hours" if self.limit.is_reached() else None


def code_of_stop() -> int:
    """Return the exit code of an orderly stop: `STOPPED`, but 0 where torchrun would start the run again at once."""
    restarts, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return 0 if restarts < most else STOPPED


def seconds_since_start() -> float:
    """Return the age of this process; under torchrun that of torchrun, whose restarts are part of the same job."""
    process = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no /proc: from the import of this module on
        return time.monotonic() - _IMPORTED
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of the whole line
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


_IMPORTED = time.monotonic()
