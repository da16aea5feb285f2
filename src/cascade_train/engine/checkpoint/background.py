"""Work beside the loop, piece by piece on one thread, and how each piece ended.

What the work is, and how the ranks agree on its outcome, is decided by who starts it. Data workers may be forked
meanwhile: a child holds a copy of the thread's open files, but neither runs the thread nor unwinds its stack, so
nothing that was buffered is ever written twice.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch


class Piece:
    """A piece of work that was handed to a thread.

    Args:
        work: what to do.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._is_done = threading.Event()
        self._begun, self._ended = time.monotonic(), math.inf

    @property
    def failed(self) -> bool:
        """Whether the work has ended in an error by now; never waits."""
        return self._error is not None

    @property
    def seconds(self) -> float:
        """How long the work took, or has taken so far."""
        return min(time.monotonic(), self._ended) - self._begun

    def finish(self) -> None:
        """Wait for the work to end, and raise what it raised."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error

    def do(self) -> None:
        """Do the work and keep what it raises."""
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended = time.monotonic()
            self._is_done.set()


class Background:
    """A thread that does one piece of work after the other.

    One for all of them, since the allocator keeps memory for each thread that there was. It is a daemon, so that a
    process that must end at once can; who ends in order finishes the pieces first.
    """

    def __init__(self, *, name: str) -> None:
        """Store; the thread begins with the first piece.

        Args:
            name: of the thread, for whoever looks at a process from outside.
        """
        self._name = name
        self._pieces: SimpleQueue[Piece | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], object]) -> Piece:
        """Hand a piece of work to the thread; it computes on the device that is current here at the first."""
        if self._thread is None:
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._thread = threading.Thread(target=self._run, args=(device,), name=self._name, daemon=True)
            self._thread.start()
        piece = Piece(work)
        self._pieces.put(piece)
        return piece

    def end(self) -> None:
        """Wait for all pieces and let the thread end; the next piece begins another."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # each thread begins on the first device
        while (piece := self._pieces.get()) is not None:
            piece.do()
