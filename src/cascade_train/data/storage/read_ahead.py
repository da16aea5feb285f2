"""Several reads at a time in one process, for stores that answer late. Order is the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Reads begun before they are asked for. Threads belong to the process that began them.

    Args:
        threads: reads at a time.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: tuple[int, ThreadPoolExecutor] | None = None
        self._begun: dict[int, Future[T]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {"_threads": self._threads, "_pool": None, "_begun": {}}

    def begin(self, rows: Iterable[int], read: Callable[[int], T]) -> None:
        """Begin to read these rows; those begun before and not taken are dropped."""
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool, self._begun = (os.getpid(), ThreadPoolExecutor(self._threads)), {}
        for future in self._begun.values():
            future.cancel()
        pool = self._pool[1]
        self._begun = {row: pool.submit(read, row) for row in rows}

    def take(self, row: int, read: Callable[[int], T]) -> T:
        """Return what reading a row gives, or raise what it raises; wait where it was begun."""
        begun = self._begun.pop(row, None)
        return read(row) if begun is None else begun.result()
