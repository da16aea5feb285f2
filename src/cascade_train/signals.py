"""What asks a run to stop: which signals, and what they do until steps are trained.

Imports little: `__main__` sets handlers here before anything heavy is imported.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import Any, Self

from cascade_train.errors import INTERRUPTED, STOPPED, Interrupted

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C, and what schedulers send before they kill. SIGCONT, which SLURM sends with SIGTERM, changes nothing."""

SAME_REQUEST_SECONDS = 3.0
"""A signal that comes again within this time is the same request: a scheduler signals every process of a job, and
torchrun, signalled too, passes it on once more. A repeated Ctrl-C is a person's, and counts at once."""

CONTINUED = "The same command continues from the newest checkpoint, or from the start where there is none yet."

Handler = Callable[[int, FrameType | None], Any]


def set_handlers(handler: Handler) -> dict[signal.Signals, Any]:
    """Set the handler of all stop signals and return those of before; what is ignored, as under nohup, stays so.

    Python has signals in its main thread alone: in any other this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    return {each: signal.signal(each, handler) for each in heard}


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Handle stop signals for the block; afterwards the handlers of before are back."""
    before = set_handlers(handler)
    try:
        yield
    finally:
        for each, previous in before.items():
            signal.signal(each, signal.SIG_DFL if previous is None else previous)


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """End the process, for a signal during imports: an exception would be lost or changed in a library's start-up."""
    stop = stop_before_steps(number)
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        os.write(2, f"{stop} {CONTINUED}\n".encode())
    os._exit(stop.code)


def stop_before_steps(number: int) -> Interrupted:
    """Return how a signal ends a process that has nothing to save yet."""
    code = INTERRUPTED if number == signal.SIGINT else STOPPED
    return Interrupted(f"Stopped by {signal.Signals(number).name} before the first step.", code=code)


@contextmanager
def held_back() -> Iterator[None]:
    """Let a stop signal wait for the end of the block, for what must not be left half done."""
    heard: list[int] = []
    try:
        with handling(lambda number, _: heard.append(number)):
            yield
    finally:
        for number in heard[:1]:
            signal.raise_signal(number)


class Signals:
    """Hears what asks this process to stop, while the block runs; afterwards the handlers of before are back.

    During set-up a signal ends the process at once. Once steps run (`wait_for_votes`), the first one is kept until
    the ranks agree on it. The same one again, or Ctrl-C, or anything after Ctrl-C, ends the process at once.

    Attributes:
        first: the signal that asked for a stop; None = none did.
    """

    def __init__(self) -> None:
        """Store; no handler is set yet."""
        self.first: signal.Signals | None = None
        self._heard = 0.0
        self._voting = False
        self._handling: AbstractContextManager[None] = handling(self._receive)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the handlers; an error that a library made of a stop during set-up is that stop again.

        Raises:
            Interrupted: the same.
        """
        self._handling.__exit__(None, None, None)
        if self.first is not None and not self._voting and isinstance(error, Exception):
            raise stop_before_steps(self.first) from error

    def wait_for_votes(self) -> None:
        """Set-up is over: from now on the first signal waits for the next vote.

        Raises:
            Interrupted: one came during set-up, and a library has swallowed what it raised.
        """
        if self.first is not None:
            raise stop_before_steps(self.first)
        self._voting = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        heard, now = signal.Signals(number), time.monotonic()
        if self.first is None:
            self.first, self._heard = heard, now
            if not self._voting:
                raise stop_before_steps(number)
        elif heard is signal.SIGINT or self._is_meant_again(heard, now):
            raise Interrupted(f"Ended at once by {heard.name}.", code=128 + number)

    def _is_meant_again(self, heard: signal.Signals, now: float) -> bool:
        insists = self.first in (heard, signal.SIGINT)
        return insists and now - self._heard >= SAME_REQUEST_SECONDS


def while_importing() -> AbstractContextManager[None]:
    """Return what ends the process at once by a stop signal, for a block of imports within a block of `Signals`.

    In a process of another program, as submitit's, whose own handlers are set, it does nothing.
    """
    is_ours = isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Signals)
    return handling(stop_at_once) if is_ours else nullcontext()
