"""What worker processes make, handed out in order, with their failures told in words.

What they make and how it is counted is the feed's business.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch.utils.data import DataLoader

from cascade_train.data.loading.patience import patience
from cascade_train.data.loading.worker import Failure
from cascade_train.data.loading.worker_process import end_workers_with_this_process
from cascade_train.errors import RunError

T = TypeVar("T")


class Receiver(Generic[T]):
    """The results of a `DataLoader`, begun when the first is asked for.

    A wait of a minute is said, one longer than the loader's timeout is an error.
    """

    def __init__(self, data_loader: DataLoader[T | Failure], whereabouts: Callable[[], str] = str) -> None:
        """Store; no worker starts yet.

        Args:
            data_loader: what makes the results.
            whereabouts: says where samples went, for whoever waits.
        """
        self._data_loader: DataLoader[T | Failure] | None = data_loader
        self._whereabouts = whereabouts
        self._results: Iterator[T | Failure] | None = None

    def next(self) -> T:
        """Return the next result.

        Raises:
            RunError: a worker could not make it, ended, or took longer than the timeout.
        """
        result = self._receive()
        if isinstance(result, Failure):
            error = RunError(result.text)
            error.add_note(result.trace)
            raise error
        return result

    def restart(self) -> None:
        """Drop what was prefetched; the next result is made from the beginning of the loader's sampler."""
        self._results = None

    def close(self) -> None:
        """End the worker processes; nothing can be asked for afterwards."""
        self._results = None
        self._data_loader = None

    def _receive(self) -> T | Failure:
        """Return what the workers made next; their sudden end is a failure too.

        The iterator stays out of local names, and torch's error is not passed on: a traceback that holds the
        iterator would keep the other workers alive.
        """
        assert self._data_loader is not None, "the feed is closed"
        timeout, begun = self._data_loader.timeout, time.monotonic()
        try:
            if self._results is None:
                end_workers_with_this_process()
                self._results = iter(self._data_loader)
            with patience(self._whereabouts):
                return next(self._results)
        except (RuntimeError, OSError, EOFError) as error:
            self._results = None
            trace = traceback.format_exc()
            if 0 < timeout <= time.monotonic() - begun:
                return Failure(
                    text=f"no batch for {timeout:g} s (data.max_wait_seconds). {self._whereabouts()}", trace=trace
                )
            return Failure(
                text=f"a data worker process ended unexpectedly ({error}); it may have run out of memory or shared"
                " memory: lower data.num_workers, or set it to 0 to see the cause",
                trace=trace,
            )
