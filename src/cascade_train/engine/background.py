"""One piece of work beside the loop, on a thread, and how it ended.

What the work is, and how the ranks agree on its outcome, is decided by who starts it. Data workers may be forked
meanwhile: a child holds a copy of the thread's open files, but neither runs the thread nor unwinds its stack, so
nothing that was buffered is ever written twice.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import torch


class Background:
    """Work that has begun on a thread of its own.

    The thread is a daemon, so that a process that must end at once can; who ends in order calls `finish` first.
    """

    def __init__(self, work: Callable[[], object], *, name: str) -> None:
        """Begin.

        Args:
            work: what to do; computes on the device that is current here.
            name: of the thread, for whoever looks at a process from outside.
        """
        self._work = work
        self._error: BaseException | None = None
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._begun, self._ended = time.monotonic(), math.inf
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

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
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # each thread begins on the first device
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended = time.monotonic()
