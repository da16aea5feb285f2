"""What every feed of batches shares: the request, results of worker processes, and the count of unreadable samples.

The order of samples lives in `loader.py` (an index) and `stream_feed.py` (streams), decoding in `worker.py`.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from cascade_train.batch import Batch, SampleTransform, Unreadable
from cascade_train.data.decoding.jpeg import fast_jpeg_decoder
from cascade_train.data.index.rows import Index
from cascade_train.data.loading.worker import Failure, begin_worker, end_workers_with_this_process
from cascade_train.data.sample import FEW, by_reason, most_unreadable, too_many_text
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError, RunError

WAIT_WARNING_SECONDS = 60.0
"""How often a wait for one batch is logged."""

Gather = Callable[[Any], list[Any]]
T = TypeVar("T")
_log = logging.getLogger(__name__)


def alone(value: Any) -> list[Any]:
    """Gather the value of the only rank."""
    return [value]


@dataclass(frozen=True, eq=False, kw_only=True)
class FeedRequest:
    """Which samples one rank's feed is over, and how they are batched.

    Attributes:
        index: what `Source.open` returned.
        rows: sorted rows of the index that take part.
        seed: the run's seed.
        global_batch_size: samples of one optimizer step over all ranks.
        micro_batch_size: samples of one forward pass on one rank.
        rank: this process, from 0.
        ranks: how many processes share the global batch.
        transform: what the workers make of each picture for the task; None = nothing.
        whole_epochs: every sample comes once an epoch in its own shape, whatever the source's leftover, replacement
            and random_share; what fills up a batch has weight 0. For measuring and for showing.
        gather: collects a value of every rank, in rank order, for feeds whose ranks know different things.
    """

    index: Index
    rows: np.ndarray
    seed: int
    global_batch_size: int
    micro_batch_size: int
    rank: int
    ranks: int
    transform: SampleTransform | None = None
    whole_epochs: bool = False
    gather: Gather = alone


class Feed(abc.ABC):
    """An endless iterator over optimizer steps, each a list of this rank's micro-batches of one shape.

    Rank and worker only decide who reads what. The state is equal on all ranks, so that any number of ranks and
    workers may continue it.

    Attributes:
        position: global batches handed out, never those prefetched.
        micro_batches: micro-batches of one step on one rank.
        skipped: the unreadable samples that this rank met, each once.
    """

    def __init__(self, source: Source, request: FeedRequest, *, samples: int | None) -> None:
        """Store; a subclass then sets `_results`. `samples` is how many take part, None = unknown.

        Raises:
            ConfigError: the global batch does not divide over ranks and micro-batches.
        """
        _check_batch_sizes(request)
        self._results: Results[Any]
        self._source, self._request = source, request
        self.position = 0
        self.micro_batches = request.global_batch_size // request.ranks // request.micro_batch_size
        self._skipped = SkippedCount(samples, source.max_unreadable_share)
        self.skipped = self._skipped.each
        self._excluded = set[str]()

    @abc.abstractmethod
    def report(self) -> list[str]:
        """Return what people should know of the samples before training starts, a line each."""

    @abc.abstractmethod
    def steps_of_epochs(self, epochs: int) -> int:
        """Return how many optimizer steps the first `epochs` epochs take."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it is a position in, equal on all ranks, as JSON holds it."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken.

        Raises:
            ConfigError: the state belongs to other data or another order, and `data.on_change` is refuse.
        """

    @abc.abstractmethod
    def _next_step(self) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch, what they skipped counted."""

    @abc.abstractmethod
    def _whereabouts(self) -> str:
        """Return where samples went, for whoever waits for a batch."""

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        step = self._next_step()
        self.position += 1
        return step

    def seek(self, position: int) -> None:
        """Continue at another position; what was prefetched is dropped."""
        self.position = position
        self._results.restart()

    def exclude(self, keys: Collection[str]) -> None:
        """Replace samples, by `Batch.keys`, with stand-ins from the next global batch on; the others keep their order.

        Where several samples of joined sources have one key, all are replaced.
        """
        self._excluded.update(keys)
        self._results.restart(new_workers=True)  # running ones know only what was excluded before

    def close(self) -> None:
        """End the worker processes. The feed cannot be used afterwards."""
        self._results.close()


class Results(Generic[T]):
    """What worker processes make of references, in order. They start when the first result is asked for.

    A wait is logged every minute; one longer than `data.max_wait_seconds` is an error.
    """

    def __init__(
        self,
        dataset: Dataset[T | Failure],
        source: Source,
        *,
        references: Iterable[Any] | None = None,
        workers: int | None = None,
        whereabouts: Callable[[], str] = str,
    ) -> None:
        """Store; no worker starts yet.

        Args:
            dataset: makes the results.
            source: whose options on workers are used.
            references: what the dataset is asked for; None = it is iterated, by workers that start anew each time.
            workers: processes; None = the source's number.
            whereabouts: returns where samples went, for whoever waits.
        """
        workers = source.num_workers if workers is None else workers
        if workers > 0:
            fast_jpeg_decoder()  # loaded once, before the workers fork
        self._whereabouts = whereabouts
        self._iterator: Iterator[T | Failure] | None = None
        self._data_loader: DataLoader[T | Failure] | None = None
        self._make: Callable[[], DataLoader[T | Failure]] | None = partial(
            DataLoader,
            dataset,
            batch_size=None,
            sampler=references,
            collate_fn=_unchanged,
            num_workers=workers,
            persistent_workers=workers > 0 and references is not None,
            multiprocessing_context=source.worker_start if workers > 0 else None,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=begin_worker,
            timeout=(source.max_wait_seconds or 0.0) if workers > 0 else 0.0,
        )

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

    def restart(self, *, new_workers: bool = False) -> None:
        """Drop what was prefetched; the next result is made of the first reference."""
        self._iterator = None
        if new_workers:
            self._data_loader = None

    def close(self) -> None:
        """End the worker processes; no result can be asked for afterwards."""
        self._iterator = self._data_loader = self._make = None

    def _receive(self) -> T | Failure:
        """Return what the workers made next; their sudden end is a failure too.

        The iterator stays out of local names, and torch's error is not passed on: a traceback that holds the
        iterator would keep the other workers alive.
        """
        assert self._make is not None, "the feed is closed"
        if self._data_loader is None:
            self._data_loader = self._make()
        timeout, begun = self._data_loader.timeout, time.monotonic()
        try:
            if self._iterator is None:
                end_workers_with_this_process()
                self._iterator = iter(self._data_loader)
            with _logged_wait(self._whereabouts):
                return next(self._iterator)
        except (RuntimeError, OSError, EOFError) as error:
            self._iterator = None
            text = (
                f"a data worker process ended unexpectedly ({error}); it may have run out of memory or shared memory:"
                " lower data.num_workers, or set it to 0 to see the cause"
            )
            if 0 < timeout <= time.monotonic() - begun:
                text = f"no batch for {timeout:g} s (data.max_wait_seconds). {self._whereabouts()}"
            return Failure(text=text, trace=traceback.format_exc())


class SkippedCount:
    """Unreadable samples that one rank met.

    Args:
        samples: how many take part; None = unknown.
        max_share: of unreadable ones.

    Attributes:
        each: every one once, in the order met, for the reason it had first.
    """

    def __init__(self, samples: int | None, max_share: float) -> None:
        self.each: list[Unreadable] = []
        self._names = set[str]()
        self._samples, self._max_share, self._seen = samples, max_share, 0

    def add(self, batch: Batch) -> None:
        """Count what a batch skipped.

        Before every sample may have been seen once, a few more than the share are allowed.

        Raises:
            RunError: they are more than the share allowed.
        """
        self._seen += len(batch)
        for each in batch.skipped:
            if each.name not in self._names:
                self._names.add(each.name)
                self.each.append(each)
                _log.warning("unreadable sample, another stands in: %s", each)
        samples, most = self._seen, FEW + self._max_share * self._seen
        if self._samples is not None and self._seen >= self._samples:
            samples, most = self._samples, most_unreadable(self._samples, self._max_share)
        if len(self.each) > most:
            listed = by_reason(self.each[:20]) + ("; ..." if len(self.each) > 20 else "")
            raise RunError(
                f"{too_many_text(len(self.each), samples, self._max_share, listed)} Another run leaves them out by"
                " data.quarantine=<this run.dir>."
            )


@contextmanager
def _logged_wait(whereabouts: Callable[[], str]) -> Iterator[None]:
    """Log a warning once a minute for as long as the body takes; `whereabouts` is called in another thread."""
    done = threading.Event()

    def watch() -> None:
        minutes = 0
        while not done.wait(WAIT_WARNING_SECONDS):
            minutes += 1
            _log.warning("No batch for %g s. %s", minutes * WAIT_WARNING_SECONDS, whereabouts())

    watcher = threading.Thread(target=watch, name="logged wait", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()  # no thread is left when a feed starts processes


def _unchanged(result: Any) -> Any:
    return result


def _check_batch_sizes(request: FeedRequest) -> None:
    whole, micro, ranks = request.global_batch_size, request.micro_batch_size, request.ranks
    if whole < 1 or micro < 1 or whole % (ranks * micro) != 0:
        below = whole // (ranks * micro) * ranks * micro
        fits = [str(size) for size in (below, below + ranks * micro) if size > 0]
        raise ConfigError(
            f"train.global_batch_size={whole} is not a multiple of {ranks} ranks x train.micro_batch_size={micro}:"
            f" {' or '.join(fits)} would fit"
        )
