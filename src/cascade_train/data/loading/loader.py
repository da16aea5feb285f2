"""Batches of one rank, in the plan's order, with the position to resume from.

Rank and worker decide only who reads what. The state is equal on all ranks and counts global batches handed
out, never those prefetched, so that any number of ranks and workers may continue it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from cascade_train.batch import Batch, SampleTransform, Unreadable
from cascade_train.data.index.rows import Index
from cascade_train.data.loading.skipped import Skipped
from cascade_train.data.loading.worker import Failure, MicroBatches
from cascade_train.data.loading.worker_process import begin_worker
from cascade_train.data.loading.worker_results import Receiver
from cascade_train.data.order.plan import Step
from cascade_train.data.order.position import Order
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError


class Loader:
    """An endless iterator over optimizer steps, each a list of this rank's micro-batches.

    Of each global batch, rank r takes the r-th contiguous slice, and micro-batches are contiguous in it:
    concatenated over ranks and micro-batches, they are the global batch in the plan's order.

    Args:
        source: the opened source.
        index: what `source.open` returned.
        rows: sorted rows of the index that take part, from `split`.
        seed: the run's seed.
        global_batch_size: samples of one optimizer step over all ranks.
        micro_batch_size: samples of one forward pass on one rank.
        rank: this process, from 0.
        ranks: how many processes share the global batch.
        position: global batches already handed out.
        transform: what the workers make of each picture for the task; None = nothing.
        whole_epochs: every sample comes once an epoch in its own shape, whatever the source says of leftovers,
            replacement and random shapes; what fills up a batch has weight 0. For measuring and for showing.

    Attributes:
        position: global batches handed out.
    """

    def __init__(
        self,
        source: Source,
        *,
        index: Index,
        rows: np.ndarray,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        ranks: int,
        position: int = 0,
        transform: SampleTransform | None = None,
        whole_epochs: bool = False,
    ) -> None:
        if len(rows) == 0:
            raise ConfigError("data: no sample is left to read; check data and validate.share")
        check_batch_sizes(global_batch_size, micro_batch_size, ranks)
        self._order = Order(
            source,
            index=index,
            rows=rows,
            seed=seed,
            global_batch_size=global_batch_size,
            whole_epochs=whole_epochs,
        )
        self.position = position
        self._rows, self._skipped = rows, Skipped(len(rows), source.max_unreadable_share)
        self._micro_batches = global_batch_size // ranks // micro_batch_size
        self._source, self._index, self._excluded = source, index, set[str]()
        self._references = _References(self, self._order, micro_batch_size, rank * global_batch_size // ranks)
        self._dataset = MicroBatches(source, index, self._order.stand_ins(), seed, transform, self._excluded)
        self._receiver = self._new_receiver()

    @property
    def skipped(self) -> list[Unreadable]:
        """The unreadable samples that this rank met, each once."""
        return self._skipped.each

    @property
    def samples_per_epoch(self) -> int:
        """How many samples take part."""
        return len(self._rows)

    def report(self) -> list[str]:
        """Return the histogram of shapes, which of them fill slowly, and how many samples are enlarged."""
        return self._order.report()

    def steps_of_epochs(self, epochs: int) -> int:
        """Return how many optimizer steps the first `epochs` epochs take; the last may open the next epoch."""
        return self._order.steps_of_epochs(epochs)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step on one rank."""
        return self._micro_batches

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        step = [self._next_micro() for _ in range(self._micro_batches)]
        self.position += 1
        return step

    def seek(self, position: int) -> None:
        """Continue at another position; what was prefetched is dropped."""
        self.position = position
        self._receiver.restart()

    def exclude(self, keys: Collection[str]) -> None:
        """Let others stand in for samples from now on. Workers end, since they know only what was excluded before."""
        self._excluded.update(keys)
        self._receiver.close()
        self._receiver = self._new_receiver()

    def close(self) -> None:
        """End the worker processes. The loader cannot be used afterwards."""
        self._receiver.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it is a position in, equal on all ranks."""
        return self._order.state(self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken.

        Raises:
            ConfigError: the state counts batches of another order or size, and `data.on_change` is refuse.
        """
        self.seek(self._order.restore(state))

    def _new_receiver(self) -> Receiver[Batch]:
        return Receiver(_data_loader(self._source, self._dataset, self._references), self._whereabouts)

    def _whereabouts(self) -> str:
        """Say where samples went, for who waits for a batch."""
        step = self._order.step(self.position)
        waiting = -sum(taken for taken in self._order.state(self.position)["start"]["taken"] if taken < 0)
        return (
            f"Of {len(self._index)} samples in the index {len(self._index) - len(self._rows)} are left out (filtered or"
            f" held out) and {len(self._skipped.each)} were unreadable here; {waiting} of earlier epochs wait until"
            f" their shape fills a batch. {self.position} global batches were handed out; the next is of"
            f" {step.height} x {step.width} px, its first sample is {self._index.name(int(step.rows[0]))}. If its store"
            " is slow, raise data.num_workers or data.max_wait_seconds; if a worker hangs, data.num_workers=0 shows"
            " where"
        )

    def _next_micro(self) -> Batch:
        batch = self._receiver.next()
        self._skipped.count(batch)
        return batch


class _References(Sampler[Step]):
    """This rank's micro-batches as references, from the loader's position on, without end."""

    def __init__(self, loader: Loader, order: Order, micro_batch_size: int, first: int) -> None:
        self._loader, self._order = loader, order
        self._micro_batch_size, self._first = micro_batch_size, first

    def __iter__(self) -> Iterator[Step]:
        position = self._loader.position
        while True:
            step = self._order.step(position)
            for micro in range(self._loader.micro_batches):
                start = self._first + micro * self._micro_batch_size
                yield step.part(start, start + self._micro_batch_size)
            position += 1


def _data_loader(source: Source, micro_batches: MicroBatches, references: _References) -> DataLoader[Batch | Failure]:
    workers = source.num_workers
    return DataLoader(
        micro_batches,
        batch_size=None,
        sampler=references,
        collate_fn=_unchanged,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context=source.worker_start if workers > 0 else None,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=begin_worker,
        timeout=(source.max_wait_seconds or 0.0) if workers > 0 else 0.0,
    )


def _unchanged(batch: Any) -> Any:
    return batch


def check_batch_sizes(global_batch_size: int, micro_batch_size: int, ranks: int) -> None:
    """Check that a global batch divides over ranks and micro-batches.

    Raises:
        ConfigError: it does not.
    """
    if global_batch_size < 1 or micro_batch_size < 1 or global_batch_size % (ranks * micro_batch_size) != 0:
        below = global_batch_size // (ranks * micro_batch_size) * ranks * micro_batch_size
        fits = [str(size) for size in (below, below + ranks * micro_batch_size) if size > 0]
        raise ConfigError(
            f"train.global_batch_size={global_batch_size} is not a multiple of {ranks} ranks x"
            f" train.micro_batch_size={micro_batch_size}: {' or '.join(fits)} would fit"
        )
