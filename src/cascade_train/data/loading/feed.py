"""Batches of one rank: the base of every feed, and the feed of an index, in the plan's order.

See `stream_feed.py` for streams, `order/` for the order, `worker.py` for reading, decoding and processes.
"""

from __future__ import annotations

import abc
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from cascade_train.batch import Batch, Unreadable
from cascade_train.data.loading.worker import MicroBatches, Results
from cascade_train.data.order.plan import Step
from cascade_train.data.order.position import FeedRequest, Order
from cascade_train.data.sample import FEW, by_reason, most_unreadable, too_many_text
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError, RunError

_log = logging.getLogger(__name__)


class Feed(abc.ABC):
    """An endless iterator over optimizer steps, each a list of this rank's micro-batches of one shape.

    Rank and worker only decide who reads what; any number of them may continue a state. Samples of `data.exclude` are
    replaced by stand-ins, and all others keep their places; where joined sources share a key, all its samples are.
    """

    _order: Order
    _results: Results[Any]

    def __init__(self, source: Source, request: FeedRequest, *, samples: int | None) -> None:
        """Store; a subclass then sets `_results`, and `_order` or its methods. `samples` take part, None = unknown.

        A ConfigError where the global batch does not divide over ranks and micro-batches.
        """
        whole, together = request.global_batch_size, request.ranks * request.micro_batch_size
        if whole < 1 or together < 1 or whole % together != 0:
            below = whole // max(1, together) * together
            fits = [str(size) for size in (below, below + together) if size > 0]
            sizes = f"{request.ranks} ranks x train.micro_batch_size={request.micro_batch_size}"
            raise ConfigError(
                f"train.global_batch_size={whole} is not a multiple of {sizes}: {' or '.join(fits)} would fit"
            )
        self._source, self._request = source, request
        self.position = 0  # global batches handed out, never those prefetched
        self.micro_batches = request.global_batch_size // request.ranks // request.micro_batch_size  # of one step
        self._skipped = SkippedCount(samples, source.max_unreadable_share)
        self.skipped = self._skipped.samples  # the unreadable samples that this rank met, each once
        self.excluded = frozenset(() if request.whole_epochs else source.exclude or ())  # keys of `data.exclude`

    def report(self) -> list[str]:
        """Lines about the samples, logged before training starts."""
        return self._order.report()

    def steps_of_epochs(self, epochs: int, state: Mapping[str, Any] | None = None) -> int:
        """Step at which the first `epochs` epochs end, of a run that goes on at `state` or begins (None)."""
        return self._order.steps_of_epochs(epochs, state)

    def state_dict(self) -> dict[str, Any]:
        """Position and identity of the order, equal on all ranks, as JSON holds it."""
        return self._order.state(self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state; a ConfigError where it does not fit and `data.on_change` is refuse."""
        self.seek(self._order.restore(state))

    @abc.abstractmethod
    def _whereabouts(self) -> str:
        """Where samples went, for the log of a long wait."""

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    @abc.abstractmethod
    def __next__(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch."""

    def seek(self, position: int) -> None:
        """Continue at another position; what was prefetched is dropped."""
        self.position = position
        self._results.restart()

    def close(self) -> None:
        """End the worker processes. The feed cannot be used afterwards."""
        self._results.close()


class Loader(Feed):
    """The feed of an index.

    Of each global batch, rank r takes the r-th contiguous slice, and micro-batches are contiguous in it:
    concatenated over ranks and micro-batches, they are the global batch in the plan's order.
    """

    def __init__(self, source: Source, request: FeedRequest) -> None:
        """Plan; no worker starts yet. Raises as `Feed`, and where no row takes part."""
        if len(request.rows) == 0:
            raise ConfigError("data: no sample is left to read; check data and validate.share")
        super().__init__(source, request, samples=len(request.rows))
        self._order = Order(source, request)
        stand_ins = self._order.stand_ins()
        batches = MicroBatches(source, request.index, stand_ins, request.seed, request.transform, self.excluded)
        references = _References(self._references)
        self._results = Results(batches, source, references=references, whereabouts=self._whereabouts)

    def __next__(self) -> list[Batch]:
        step = []
        for _ in range(self.micro_batches):
            step.append(self._results.next())
            self._skipped.add(step[-1])
        self.position += 1
        return step

    def _references(self) -> Iterator[Step]:
        request = self._request
        share = request.global_batch_size // request.ranks
        for position in itertools.count(self.position):
            step = self._order.step(position)
            for start in range(request.rank * share, (request.rank + 1) * share, request.micro_batch_size):
                yield step.part(start, start + request.micro_batch_size)

    def _whereabouts(self) -> str:
        step, index, rows = self._order.step(self.position), self._request.index, self._request.rows
        waiting = -sum(taken for taken in self._order.state(self.position)["start"]["taken"] if taken < 0)
        return (
            f"Of {len(index)} samples in the index {len(index) - len(rows)} are left out (filtered or"
            f" held out) and {len(self.skipped)} were unreadable here; {waiting} of earlier epochs wait until"
            f" their shape fills a batch. {self.position} global batches were handed out; the next is of"
            f" {step.height} x {step.width} px, its first sample is {index.name(int(step.rows[0]))}. If its store"
            " is slow, raise data.num_workers or data.max_wait_seconds; if a worker hangs, data.num_workers=0 shows"
            " where"
        )


class _References(Sampler[Step]):
    def __init__(self, begin: Callable[[], Iterator[Step]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Step]:
        return self._begin()


class SkippedCount:
    """Unreadable samples that one rank met, once each, in order, for the reason it had first."""

    def __init__(self, samples: int | None, max_share: float) -> None:
        """Store the number of samples, None = unknown, and the share of unreadable ones that stops a run."""
        self.samples: list[Unreadable] = []
        self._names = set[str]()
        self._total, self._max_share, self._seen = samples, max_share, 0

    def add(self, batch: Batch) -> None:
        """Count unreadable samples; a RunError above the share, or above a few before the first epoch ends."""
        self._seen += len(batch)
        for sample in batch.skipped:
            if sample.name not in self._names:
                self._names.add(sample.name)
                self.samples.append(sample)
                _log.warning("unreadable sample, another stands in: %s", sample)
        total, most = self._seen, FEW + self._max_share * self._seen
        if self._total is not None and self._seen >= self._total:
            total, most = self._total, most_unreadable(self._total, self._max_share)
        if (count := len(self.samples)) > most:
            listed = by_reason(self.samples[:20]) + ("; ..." if count > 20 else "")
            text = too_many_text(count, total, self._max_share, listed)
            raise RunError(f"{text} With that, this run continues; a new run takes data.quarantine=<this run.dir>.")
