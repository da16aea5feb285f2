"""Saying what a feed waits for, while it waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 60.0
"""After which a wait for one batch is said, and again as often."""

_log = logging.getLogger(__name__)


@contextmanager
def patience(whereabouts: Callable[[], str]) -> Iterator[None]:
    """Log a warning once a minute for as long as the body takes.

    Args:
        whereabouts: says where samples went; called in another thread.
    """
    done = threading.Event()

    def watch() -> None:
        minutes = 0
        while not done.wait(PATIENCE_SECONDS):
            minutes += 1
            _log.warning("No batch for %g s. %s", minutes * PATIENCE_SECONDS, whereabouts())

    watcher = threading.Thread(target=watch, name="patience", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()  # no thread is left when a feed starts processes
