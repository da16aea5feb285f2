"""Batches of one rank from an index, in the plan's order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from cascade_train.batch import Batch
from cascade_train.data.loading.feed import Feed, FeedRequest, Results
from cascade_train.data.loading.worker import MicroBatches
from cascade_train.data.order.plan import Step
from cascade_train.data.order.position import Order
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError


class Loader(Feed):
    """The feed of an index.

    Of each global batch, rank r takes the r-th contiguous slice, and micro-batches are contiguous in it:
    concatenated over ranks and micro-batches, they are the global batch in the plan's order.
    """

    def __init__(self, source: Source, request: FeedRequest) -> None:
        """Plan; no worker starts yet.

        Raises:
            ConfigError: no row takes part, or the global batch does not divide over ranks and micro-batches.
        """
        if len(request.rows) == 0:
            raise ConfigError("data: no sample is left to read; check data and validate.share")
        super().__init__(source, request, samples=len(request.rows))
        self.samples_per_epoch = len(request.rows)
        self._order = Order(
            source,
            index=request.index,
            rows=request.rows,
            seed=request.seed,
            global_batch_size=request.global_batch_size,
            whole_epochs=request.whole_epochs,
        )
        stand_ins = self._order.stand_ins()
        batches = MicroBatches(source, request.index, stand_ins, request.seed, request.transform, self._excluded)
        self._results = Results(
            batches, source, references=_References(self._references), whereabouts=self._whereabouts
        )

    def report(self) -> list[str]:
        """Return the histogram of shapes, which of them fill slowly, and how many samples are enlarged."""
        return self._order.report()

    def steps_of_epochs(self, epochs: int) -> int:
        """Return how many optimizer steps the first `epochs` epochs take; the last may open the next epoch."""
        return self._order.steps_of_epochs(epochs)

    def state_dict(self) -> dict[str, Any]:
        """See `Feed.state_dict`."""
        return self._order.state(self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Feed.load_state_dict`."""
        self.seek(self._order.restore(state))

    def _next_step(self) -> list[Batch]:
        step = []
        for _ in range(self.micro_batches):
            step.append(self._results.next())
            self._skipped.add(step[-1])
        return step

    def _references(self) -> Iterator[Step]:
        """Yield references to this rank's micro-batches from the position on, without end."""
        request = self._request
        share = request.global_batch_size // request.ranks
        for position in itertools.count(self.position):
            step = self._order.step(position)
            for start in range(request.rank * share, (request.rank + 1) * share, request.micro_batch_size):
                yield step.part(start, start + request.micro_batch_size)

    def _whereabouts(self) -> str:
        step, index = self._order.step(self.position), self._request.index
        waiting = -sum(taken for taken in self._order.state(self.position)["start"]["taken"] if taken < 0)
        return (
            f"Of {len(index)} samples in the index {len(index) - self.samples_per_epoch} are left out (filtered or"
            f" held out) and {len(self.skipped)} were unreadable here; {waiting} of earlier epochs wait until"
            f" their shape fills a batch. {self.position} global batches were handed out; the next is of"
            f" {step.height} x {step.width} px, its first sample is {index.name(int(step.rows[0]))}. If its store"
            " is slow, raise data.num_workers or data.max_wait_seconds; if a worker hangs, data.num_workers=0 shows"
            " where"
        )


class _References(Sampler[Step]):
    """What an iterator begins anew each time it is asked for."""

    def __init__(self, begin: Callable[[], Iterator[Step]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Step]:
        return self._begin()
