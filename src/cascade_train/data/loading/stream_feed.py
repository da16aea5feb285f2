"""Batches of one rank from tars that are only read forward.

An epoch is a function of the tars, the seed and the number of readers, which are the workers of all ranks. It ends for
all ranks together, as soon as one cannot fill its share of a global batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from cascade_train.batch import Batch
from cascade_train.data.index.rows import changed_content
from cascade_train.data.loading.feed import Feed
from cascade_train.data.loading.worker import MicroBatches, Results, failure
from cascade_train.data.order.plan import Step
from cascade_train.data.order.position import FeedRequest, read_identity
from cascade_train.data.sample import RawSample
from cascade_train.data.stream import Streams, StreamSample
from cascade_train.data.tar.members import raw_sample
from cascade_train.data.webdataset import WebDataset
from cascade_train.errors import ConfigError, RunError

ORDER_VERSION = 1
_log = logging.getLogger(__name__)


class StreamFeed(Feed):
    """The feed of tars without an index; the rows of its request are tars."""

    def __init__(self, source: WebDataset, request: FeedRequest) -> None:
        """Deal the tars; no worker starts yet. Raises as `Feed`."""
        super().__init__(source, request, samples=None)
        workers = min(source.num_workers, max(1, len(request.rows) // request.ranks))
        if workers < source.num_workers:
            text = "Of %d workers %d are used: %d tars are dealt to %d ranks."
            _log.info(text, source.num_workers, workers, len(request.rows), request.ranks)
        streams = source.streams(request.rows.tolist(), request.seed, mixed=not request.whole_epochs)
        order = {
            "order": f"streams-{ORDER_VERSION}",
            "index": request.index.digest,
            "rows": request.rows_digest,
            "filters": request.index.filters or "none",
            "seed": str(request.seed),
        }
        self._identity = " ".join(f"{name}={value}" for name, value in order.items())
        sizes = (request.ranks, workers, request.global_batch_size, request.micro_batch_size, streams.buffer_samples)
        self._dealt = "/".join(map(str, sizes))
        self._taken = 0  # global batches of the epoch
        batches = InMemoryBatches(source, request.index, {}, request.seed, request.transform, self.excluded)
        self._part = _Part(streams, batches, request.rank, request.ranks, request.micro_batch_size)
        self._results = Results(self._part, source, workers=workers, whereabouts=self._whereabouts)
        self._begin(0, 0)

    def report(self) -> list[str]:
        """See `Feed.report`."""
        mix = f"data.buffer_samples={self._part.streams.buffer_samples}"
        return [f"Not all tars can be indexed, so all are streamed: squares, mixed within {mix}, length unknown."]

    def steps_of_epochs(self, epochs: int, state: Mapping[str, Any] | None = None) -> int:
        """Raise a ConfigError: the length of streams is unknown."""
        raise ConfigError(
            "data.urls are streams, whose length is unknown: give train.max_steps instead of train.max_epochs, and"
            " hold out by validate.urls of tars that can be indexed instead of validate.share"
        )

    def seek(self, position: int) -> None:
        """Start over; streams know no other place that was not saved."""
        assert position == 0, "a stream is entered at its beginning, or where a state was taken"
        self.position = 0
        self._begin(0, 0)

    def state_dict(self) -> dict[str, Any]:
        """See `Feed.state_dict`."""
        return {
            "position": self.position,
            "identity": self._identity,
            "global_batch_size": self._request.global_batch_size,
            "content": self._request.index.content_record,
            "dealt": self._dealt,
            "epoch": self._part.epoch,
            "taken": self._taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Feed.load_state_dict`; where the readers are others, another epoch begins."""
        saved, now = read_identity(state), read_identity({"identity": self._identity})
        changed = [f"{name} was {saved.get(name)}, is {now[name]}" for name in now if saved.get(name) != now[name]]
        changed = changed or changed_content(self._request.index, state)
        if changed and self._source.on_change == "refuse":
            text = f"the checkpoint's place in its streams does not fit this run: {'; '.join(changed)}"
            raise ConfigError(f"{text}. Set it back, or begin another epoch by data.on_change=restart")
        epoch, taken = state.get("epoch", state.get("start", {}).get("epoch", 0)), state.get("taken", 0)
        if not changed and state.get("dealt") != self._dealt:
            changed = ["ranks, workers, sizes of batches or data.buffer_samples decide who reads which sample"]
        if changed:
            epoch, taken = epoch + 1, 0
            _log.warning("The streams begin epoch %d, since they changed: %s.", epoch, "; ".join(changed))
        elif taken:
            seen = taken * self._request.global_batch_size
            _log.info("Reads epoch %d of the streams again, and skips the %d samples that were seen.", epoch, seen)
        self.position = state["position"]
        self._begin(epoch, taken)

    def _begin(self, epoch: int, taken: int) -> None:
        self._taken, self._unread = taken, taken * self.micro_batches
        self._part.epoch, self._part.seen = epoch, self._unread
        self._results.restart()

    def __next__(self) -> list[Batch]:
        gather = self._request.gather or (lambda value: [value])
        for _ in range(2):
            step = self._draw()
            if all(gather(step is not None)):
                assert step is not None
                break
            self._begin(self._part.epoch + 1, 0)
        else:
            raise RunError(
                "data.urls: an epoch of these tars does not fill one global batch on every rank: lower"
                f" train.global_batch_size={self._request.global_batch_size} or data.num_workers, or give more tars."
                " The log says which samples were left out"
            )
        for batch in step:
            self._skipped.add(batch)
        self._taken, self.position = self._taken + 1, self.position + 1
        return step

    def _draw(self) -> list[Batch] | None:
        """The rank's part of a global batch; None where what is left of the epoch does not fill it."""
        try:
            while self._unread:
                self._results.next()
                self._unread -= 1
            return [self._results.next() for _ in range(self.micro_batches)]
        except StopIteration:
            return None

    def _whereabouts(self) -> str:
        return f"{self._taken} global batches of epoch {self._part.epoch} were handed out; a command may be slow."


class InMemoryBatches(MicroBatches):
    """Micro-batches of samples that are in memory and not in the index."""

    def first(self, waiting: Sequence[StreamSample], count: int, epoch: int) -> Batch | RunError:
        """Make a batch of the first samples; the others that are held may stand in for them."""
        size = self._source.image_size
        self._held = {sample.number: sample for sample in waiting}
        self._stand_ins = {(size, size): np.array(sorted(self._held), dtype=np.int64)}
        rows = np.array([sample.number for sample in waiting[:count]], dtype=np.int64)
        return self[Step(rows=rows, epochs=np.full(count, epoch), height=size, width=size)]

    def read(self, row: int) -> RawSample:
        """See `MicroBatches.read`; rows are the samples' numbers."""
        sample = self._held[row]
        for part, content in sample.parts.items():
            self._source.limits.check(part, len(content))
        return raw_sample(sample.parts, sample.key, needs_values=self._source.captions.needs_values)

    def name(self, row: int) -> str:
        """See `MicroBatches.name`."""
        return self._held[row].key


@dataclass(eq=False)
class _Part(IterableDataset[Batch | RunError | None]):
    """One rank's micro-batches of an epoch, None for each that was seen before; a worker makes its own."""

    streams: Streams
    batches: InMemoryBatches
    rank: int
    ranks: int
    micro_batch_size: int
    epoch: int = 0
    seen: int = 0  # micro-batches of the rank

    def __iter__(self) -> Iterator[Batch | RunError | None]:
        worker, size = get_worker_info(), self.micro_batch_size
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        waiting, batches = list[StreamSample](), 0
        try:
            for block in self.streams.blocks(self.epoch, self.rank * workers + number, self.ranks * workers):
                waiting += block
                while len(waiting) >= size:
                    # Workers take turns, and some end early: this is the latest turn that the batch may have.
                    is_seen = batches * workers + number < self.seen
                    yield None if is_seen else self.batches.first(waiting, size, self.epoch)
                    waiting, batches = waiting[size:], batches + 1
        except Exception as error:  # raised again in the main process
            yield failure("streams", error)
