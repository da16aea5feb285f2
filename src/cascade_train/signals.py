"""Stop signals: which there are, and what they do before the first step.

Imports little: `__main__` sets handlers before anything heavy is imported.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, Self

from cascade_train.errors import INTERRUPTED, STOPPED, Interrupted

SENT_AGAIN = (signal.SIGHUP, signal.SIGXCPU)
"""A closed terminal, and the limit of CPU time. The system repeats them, so that a second one never ends a save."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *SENT_AGAIN)
"""Ctrl-C, what schedulers send before they kill, and what torchrun passes on. SIGCONT, which SLURM sends with SIGTERM,
has no effect."""

PATIENCE_SECONDS = 10.0
"""How long ranks that train together wait for data after a signal: a step that has begun elsewhere cannot be undone."""

SAME_REQUEST_SECONDS = 3.0
"""A signal repeated within this time is the same request: a scheduler signals every process of a job, and torchrun
passes its own signal on. A repeated Ctrl-C comes from a person and counts at once."""

CONTINUED = "The same command continues from the newest checkpoint, or from the start where there is none yet."

Handler = Callable[[int, FrameType | None], Any]


def set_handlers(handler: Handler) -> dict[signal.Signals, Any]:
    """Set the handler of all stop signals and return the previous ones; ignored signals, as under nohup, stay ignored.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    handled = [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    return {each: signal.signal(each, handler) for each in handled}


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Handle stop signals within the block, then restore the previous handlers."""
    before = set_handlers(handler)
    try:
        yield
    finally:
        for each, previous in before.items():
            signal.signal(each, signal.SIG_DFL if previous is None else previous)


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """End the process on a signal during imports, where a library could swallow an exception."""
    stop = _stop_before_steps(number)
    _say(f"{stop} {CONTINUED}")
    os._exit(stop.code)


def _say(text: str) -> None:
    """Write a line to stderr on the first rank, by a call that is safe in a signal handler."""
    if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0":
        with suppress(OSError):  # the terminal may be closed
            os.write(2, f"\n{text}\n".encode())


def _stop_before_steps(number: int) -> Interrupted:
    """Return the interrupt for a signal that comes before there is anything to save."""
    code = INTERRUPTED if number == signal.SIGINT else STOPPED
    return Interrupted(f"Stopped by {signal.Signals(number).name} before the first step.", code=code)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer stop signals to the end of the block, which must not be left half done."""
    received: list[int] = []
    try:
        with handling(lambda number, _: received.append(number)):
            yield
    finally:
        for number in received[:1]:
            signal.raise_signal(number)


class Signals(ExitStack):
    """Receives stop signals while the block runs; afterwards restores the previous handlers.

    During set-up a signal ends the process at once. Once steps run (`wait_for_votes`), the first one is kept until
    the ranks agree on it. The same one again, or Ctrl-C, or anything after Ctrl-C, ends the process at once.

    Attributes:
        first: the first signal received; None = none was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: signal.Signals | None = None
        self._first_time = 0.0
        self._voting = False
        self._patience_seconds: float | None = None  # None = it waits for nothing

    def __enter__(self) -> Self:
        self.push(self._raise_again)
        self.enter_context(handling(self._receive))
        return self

    def _raise_again(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the stop again where a library turned it into an error during set-up."""
        if self.first is not None and not self._voting and isinstance(error, Exception):
            raise _stop_before_steps(self.first) from error

    def wait_for_votes(self) -> None:
        """End set-up: from now on the first signal waits for the next vote; one that a library swallowed is raised."""
        if self.first is not None:
            raise _stop_before_steps(self.first)
        self._voting = True

    @contextmanager
    def ending_a_wait(self, *, patience_seconds: float) -> Iterator[None]:
        """Raise `Interrupted` within the block once a stop signal has been pending for `patience_seconds`.

        For waits that nothing else ends, such as one for data. Uses SIGALRM from the signal to the end of the block.
        """
        self._patience_seconds = patience_seconds
        if self.first is not None:
            self._set_alarm()
        try:
            yield
        finally:
            self._patience_seconds = None
            if self.first is not None:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _set_alarm(self) -> None:
        assert self._patience_seconds is not None
        signal.signal(signal.SIGALRM, self._give_up)
        signal.setitimer(signal.ITIMER_REAL, self._patience_seconds or 1e-6)

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        assert self.first is not None
        raise Interrupted(f"Stopped by {self.first.name} during a wait for data.", code=STOPPED)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received, now = signal.Signals(number), time.monotonic()
        if self.first is None:
            self.first, self._first_time = received, now
            if not self._voting:
                raise _stop_before_steps(number)
            is_single = received in (signal.SIGINT, *SENT_AGAIN)
            again = "Ctrl-C" if is_single else f"{received.name} once more, or Ctrl-C,"
            _say(f"{received.name}: saves and stops after this step. {again} ends the run at once, without saving.")
            if self._patience_seconds is not None:
                self._set_alarm()
            return
        is_late = now - self._first_time >= SAME_REQUEST_SECONDS and received not in SENT_AGAIN
        if received is signal.SIGINT or (is_late and self.first in (received, signal.SIGINT)):
            raise Interrupted(f"Ended at once by {received.name}.", code=128 + number)


def while_importing() -> AbstractContextManager[None]:
    """Let stop signals end the process at once within a block of imports inside a block of `Signals`.

    Does nothing where another program, such as submitit, has set its own handlers.
    """
    is_ours = isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Signals)
    return handling(stop_at_once) if is_ours else nullcontext()
