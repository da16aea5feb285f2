"""Orderly ends before the last step: signals (signals.py), a limit of time, and the vote of the ranks on them."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import AbstractContextManager
from datetime import timedelta
from enum import IntFlag

import psutil
import torch
import torch.distributed as dist

from cascade_train.distributed.consensus import from_every_rank, own_group
from cascade_train.errors import STOPPED
from cascade_train.signals import PATIENCE_SECONDS, Signals


class Request(IntFlag):
    """What a rank may ask of all ranks."""

    STOP = 1
    """Save and end."""
    SAVE_FAILED = 2
    """The unfinished save has failed on a rank: wait for it, which raises."""


class TimeLimit:
    """A limit of time, reached while one more step and a save still fit into it; `max_hours` None = no limit.

    Estimates: twice the longest of the last `remembered` steps, since a vote takes a step, without the first of all,
    which sets things up; and the longest save so far, or before there was one the time until that step ended.
    """

    REMEMBERED = 100

    def __init__(self, *, max_hours: float | None, remembered: int = REMEMBERED) -> None:
        self._limit_seconds = None if max_hours is None else 3600.0 * max_hours
        self._steps: deque[float] = deque(maxlen=remembered)
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
        """Note how long a save held up the loop, which does not count for the step."""
        self.note_save(seconds)
        if self._begun is not None:
            self._begun += seconds

    def note_save(self, seconds: float) -> None:
        """Note how long a save took, in the loop or beside it."""
        self._save_seconds = max(self._save_seconds, seconds)

    def is_reached(self) -> bool:
        """Whether another step and a save might not fit any more; once reached, it stays so."""
        if self._limit_seconds is not None and not self._is_reached:
            needed = 2 * max(self._steps, default=0.0) + (self._save_seconds or self._set_up_seconds)
            self._is_reached = seconds_since_start() + needed >= self._limit_seconds
        return self._is_reached


class Stopping:
    """The votes of the ranks, one for each optimizer step: a request of any rank is agreed by all, on the same step.

    With several ranks the result is known one step later: the vote is exchanged, as a host tensor over gloo, while the
    next step runs, without waiting for the device; it may wait `timeout_seconds` for other ranks. With one rank it is
    known at once. The constructor is collective: it opens a group of its own, so that votes meet no other exchange.
    """

    def __init__(self, *, signals: Signals, limit: TimeLimit, timeout_seconds: float) -> None:
        self.limit = limit
        self._signals = signals
        several = dist.get_world_size() > 1
        self._group = own_group(timedelta(seconds=timeout_seconds)) if several else None
        self._exchanged: tuple[dist.Work, torch.Tensor] | None = None

    def ending_a_wait(self) -> AbstractContextManager[None]:
        """Raise `Interrupted` where a signal comes within the block: at once, but on several ranks after a while."""
        return self._signals.ending_a_wait(patience_seconds=0.0 if self._group is None else PATIENCE_SECONDS)

    def vote(self, *, save_failed: bool, save_seconds: float) -> Request:
        """Vote at the end of a step; return what the ranks agree on. See `CheckpointStore.failed`. Collective."""
        self.limit.end_step()
        self.limit.note_save(save_seconds)
        requests = Request.SAVE_FAILED if save_failed else Request(0)
        if self._reason() is not None:
            requests |= Request.STOP
        if self._group is None:
            return requests
        agreed = self._count()
        box = torch.tensor([int(request in requests) for request in Request], dtype=torch.int32)
        work = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "this rank belongs to the group"
        self._exchanged = (work, box)
        return agreed

    def _count(self) -> Request:
        if self._exchanged is None:
            return Request(0)
        work, box = self._exchanged
        work.wait()
        return Request(sum(request for request, cast in zip(Request, box.tolist(), strict=True) if cast))

    def agreed_reason(self) -> str:
        """Why the lowest rank that asked for the agreed stop did so. Collective."""
        reasons = from_every_rank(self._reason)
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        return reason if reasons.count(reason) == len(reasons) else f"{reason} on rank {rank}"

    def _reason(self) -> str | None:
        if self._signals.first is not None:
            return self._signals.first.name
        return "run.max_hours" if self.limit.is_reached() else None


def code_of_stop() -> int:
    """Exit code of an orderly stop: `STOPPED`, but 0 where torchrun would start the run again at once."""
    restarts, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return 0 if restarts < most else STOPPED


def seconds_since_start() -> float:
    """Age of this process; under torchrun that of torchrun, whose restarts are part of the same job."""
    process = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    return time.time() - float(psutil.Process(process).create_time())
