"""What the loop and its builder ask of a feed of batches, and what a feed is made from.

The usual feed is `loader.Loader`, over an index; a source that cannot be indexed brings its own by `Source.own_feed`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cascade_train.batch import Batch, SampleTransform, Unreadable
from cascade_train.data.index.rows import Index

Gather = Callable[[Any], list[Any]]


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
        whole_epochs: every sample comes once an epoch in its own shape, whatever the source says of leftovers,
            replacement and random shapes; what fills up a batch has weight 0. For measuring and for showing.
        gather: collects a value of every rank, in rank order; for feeds whose ranks know different things.
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


class Feed(Protocol):
    """An endless iterator over optimizer steps, each a list of this rank's micro-batches of one shape.

    Attributes:
        position: global batches handed out, never those prefetched.
    """

    position: int

    @property
    def skipped(self) -> list[Unreadable]:
        """The unreadable samples that this rank met, each once."""

    @property
    def samples_per_epoch(self) -> int:
        """How many samples take part."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step on one rank."""

    def report(self) -> list[str]:
        """Return what people should know of the samples before training starts, a line each."""

    def steps_of_epochs(self, epochs: int) -> int:
        """Return how many optimizer steps the first `epochs` epochs take."""

    def __iter__(self) -> Iterator[list[Batch]]:
        """Return the feed itself."""

    def __next__(self) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch."""

    def seek(self, position: int) -> None:
        """Continue at another position; what was prefetched is dropped."""

    def exclude(self, keys: Collection[str]) -> None:
        """Let others stand in for samples from the next global batch on; the order of all others stays as it was.

        Args:
            keys: as `Batch.keys` has them; where several samples of joined sources have one key, all are meant.
        """

    def close(self) -> None:
        """End the worker processes. The feed cannot be used afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it is a position in, equal on all ranks, as JSON holds it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken.

        Raises:
            ConfigError: the state belongs to other data or another order.
        """
