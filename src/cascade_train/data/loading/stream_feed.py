"""Batches of one rank from tars that are only read forward, with a position in each logical stream to resume from.

Each stream fills the same slots of every global batch, so that ranks and workers only decide who reads which stream.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from cascade_train.batch import Batch
from cascade_train.data.index.rows import changed_content
from cascade_train.data.loading.feed import Feed, FeedRequest
from cascade_train.data.loading.worker import MicroBatches, Results, failure
from cascade_train.data.order.plan import Step
from cascade_train.data.order.position import read_identity
from cascade_train.data.sample import RawSample
from cascade_train.data.source import Source
from cascade_train.data.stream import Cursor, Stream, Take
from cascade_train.data.tar.members import raw_sample
from cascade_train.errors import ConfigError, RunError

ORDER_VERSION = 1
MOST_STREAMS = 64
_log = logging.getLogger(__name__)


class StreamShare(NamedTuple):
    """The samples of one stream in one rank's share of every global batch."""

    stream: int
    cuts: list[int]  # positions among the stream's samples of a global batch where this rank's pieces begin and end


class Item(NamedTuple):
    """A worker's result for one stream and one global batch."""

    stream: int
    cursor: Cursor  # the position behind the samples
    pieces: list[Batch]  # this rank's samples, cut where micro-batches end


class StreamFeed(Feed):
    """The feed of logical streams; the rows of its request are tars."""

    def __init__(self, source: Source, request: FeedRequest, streams: Sequence[Stream]) -> None:
        """Deal all logical streams; no worker starts yet. Raises as `parts_of_rank`."""
        super().__init__(source, request, samples=None)
        spec, count = streams[0].spec, len(streams)
        self._identity = {
            "order": f"streams-{ORDER_VERSION}",
            "index": request.index.digest,
            "rows": request.rows_digest,
            "filters": request.index.filters or "none",
            "seed": str(request.seed),
            "streams": str(count),
            "blocks": f"{spec.buffer_samples}/{spec.buffer_mib}",
        }
        self._cursors = dict.fromkeys(range(count), Cursor())
        parts = parts_of_rank(request, count)
        self._own = [part.stream for part in parts]
        workers = largest_divisor(len(parts), source.num_workers)
        if workers < source.num_workers:
            _log.info("Of %d workers %d are used: this rank reads %d streams.", source.num_workers, workers, len(parts))
        batches = InMemoryBatches(source, request.index, {}, request.seed, request.transform, self.excluded)
        items = _Items(parts, streams, self._cursors, request.global_batch_size // count, batches)
        self._results = Results(items, source, workers=workers, whereabouts=self._whereabouts)

    def report(self) -> list[str]:
        """See `Feed.report`."""
        return [
            f"The data are {len(self._cursors)} logical streams, since not all tars can be indexed: pictures are"
            " square, samples mix within blocks (data.stream), and their number is unknown. Their sequence"
            " depends on the seed and the number of streams, not on ranks or workers; a resume is exact, and reads the"
            " tars that it was within from their beginning."
        ]

    def steps_of_epochs(self, epochs: int, state: Mapping[str, Any] | None = None) -> int:
        """Raise a ConfigError: the length of streams is unknown."""
        raise ConfigError(
            "data.urls are streams, whose length is unknown before they end: give train.max_steps instead of"
            " train.max_epochs, and hold out by validate.urls of tars that can be indexed instead of validate.share"
        )

    def seek(self, position: int) -> None:
        """Start over; streams know no other place that was not saved."""
        assert position == 0, "a stream is entered at its beginning, or where a state was taken"
        self._cursors.update(dict.fromkeys(self._cursors, Cursor()))
        super().seek(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in every stream, equal on all ranks. Collective where there are several."""
        mine = {stream: self._cursors[stream] for stream in self._own}
        gather = self._request.gather
        known = {stream: place for places in (gather(mine) if gather else [mine]) for stream, place in places.items()}
        return {
            "position": self.position,
            "identity": " ".join(f"{name}={value}" for name, value in self._identity.items()),
            "global_batch_size": self._request.global_batch_size,
            "content": self._request.index.content_record,
            "streams": [list(known[stream]) for stream in sorted(known)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Feed.load_state_dict`."""
        changed = self._changes(state)
        cursors = {stream: Cursor(*place) for stream, place in enumerate(state.get("streams", []))}
        if changed and self._source.on_change == "refuse":
            raise ConfigError(
                f"the checkpoint's place in its streams does not fit this run: {'; '.join(changed)}. Set back what"
                " changed (data.urls, data.streams, data.stream, data.row_filters, run.seed, train.global_batch_size),"
                " or begin another epoch by data.on_change=restart"
            )
        if changed:
            epoch = 1 + max((cursor.epoch for cursor in cursors.values()), default=0)
            _log.warning("The streams begin epoch %d, since they changed: %s.", epoch, "; ".join(changed))
            cursors = dict.fromkeys(self._cursors, Cursor(epoch=epoch))
        self._cursors.update(cursors)
        super().seek(state["position"])

    def _changes(self, state: Mapping[str, Any]) -> list[str]:
        saved = {**read_identity(state), "batch": state["global_batch_size"]}
        own = {**self._identity, "batch": self._request.global_batch_size}
        told = [f"{name} was {saved.get(name)}, is {value}" for name, value in own.items() if saved.get(name) != value]
        return told or changed_content(self._request.index, state)

    def __next__(self) -> list[Batch]:
        items: list[Item] = [self._results.next() for _ in self._own]
        assert [item.stream for item in items] == self._own, "items come in the order of the streams"
        micro_batches = _micro_batches([piece for item in items for piece in item.pieces], self._request)
        for batch in micro_batches:
            self._skipped.add(batch)
        self._cursors.update({item.stream: item.cursor for item in items})
        self.position += 1
        return micro_batches

    def _whereabouts(self) -> str:
        places = ", ".join(f"{stream}: {list(self._cursors[stream])}" for stream in self._own[:8])
        return f"This rank reads streams whose places are (epoch, tar, sample, taken) {places}; a command may be slow."


def parts_of_rank(request: FeedRequest, streams: int) -> list[StreamShare]:
    """Return which streams fill this rank's slots of a global batch, and where micro-batches cut them.

    Stream s fills slots [s c, (s + 1) c) of each global batch, c samples per stream; rank r takes its r-th share.
    """
    if request.global_batch_size % streams != 0:
        raise ConfigError(
            f"data.streams={streams} does not divide train.global_batch_size={request.global_batch_size}: each stream"
            " fills the same number of places in every batch; null chooses a number"
        )
    count, share = request.global_batch_size // streams, request.global_batch_size // request.ranks
    begin, end = request.rank * share, (request.rank + 1) * share
    borders = (stream * count for stream in range(streams))
    cuts = sorted({*range(begin, end + 1, request.micro_batch_size), *(slot for slot in borders if begin < slot < end)})
    return [
        StreamShare(stream, [cut - stream * count for cut in cuts if stream * count <= cut <= (stream + 1) * count])
        for stream in range(begin // count, -(-end // count))
    ]


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`; 0 = there is none."""
    return max((each for each in range(1, min(most, number) + 1) if number % each == 0), default=0)


class InMemoryBatches(MicroBatches):
    """Micro-batches of samples of streams, which are in memory and not in the index."""

    def pieces(self, take: Take, cuts: Sequence[int]) -> Iterator[Batch | RunError]:
        """Yield the samples between two cuts each; others of their blocks may stand in for them."""
        size = self._source.image_size
        self._held = {each.number: each for each in take.blocks}
        self._stand_ins = {(size, size): np.array(sorted(self._held), dtype=np.int64)}
        numbers, epochs = (np.array([getattr(each, name) for each in take.samples]) for name in ("number", "epoch"))
        for begin, end in itertools.pairwise(cuts):
            yield self[Step(rows=numbers[begin:end], epochs=epochs[begin:end], height=size, width=size)]

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
class _Items(IterableDataset[Item | RunError]):
    """The items of one rank, in the order of its streams; a worker makes every n-th."""

    parts: list[StreamShare]
    streams: Sequence[Stream]
    cursors: Mapping[int, Cursor]  # the feed's own: a new iterator begins at the places that they name then
    count: int  # samples that a stream gives to a global batch
    batches: InMemoryBatches

    def __iter__(self) -> Iterator[Item | RunError]:
        worker = get_worker_info()
        mine = self.parts if worker is None else self.parts[worker.id :: worker.num_workers]
        takes = [self.streams[part.stream].takes(self.cursors[part.stream], self.count) for part in mine]
        while True:
            yield from map(self._item, mine, takes)

    def _item(self, part: StreamShare, takes: Iterator[Take]) -> Item | RunError:
        try:
            take = next(takes)
        except Exception as error:
            return failure(f"stream {part.stream}", error)
        pieces = []
        for piece in self.batches.pieces(take, part.cuts):
            if isinstance(piece, RunError):
                return piece
            pieces.append(piece)
        return Item(stream=part.stream, cursor=take.cursor, pieces=pieces)


def _micro_batches(pieces: Sequence[Batch], request: FeedRequest) -> list[Batch]:
    """Join pieces, which never reach over the end of a micro-batch."""
    micro_batches, waiting = [], list[Batch]()
    for piece in pieces:
        waiting.append(piece)
        if sum(map(len, waiting)) == request.micro_batch_size:
            micro_batches.append(_joined(waiting))
            waiting = []
    assert not waiting, f"{sum(map(len, waiting))} samples fill no micro-batch"
    return micro_batches


def _joined(pieces: Sequence[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    mask = next((piece.tensors["mask"] for piece in pieces if "mask" in piece.tensors), None)
    if mask is not None:  # a sample without one counts everywhere
        whole_masks = [mask.new_full((len(piece), *mask.shape[1:]), 255) for piece in pieces]
        pairs = zip(pieces, whole_masks, strict=True)
        pieces = [replace(piece, tensors={"mask": its, **piece.tensors}) for piece, its in pairs]
    names = [field.name for field in fields(Batch)]
    whole = Batch(**{name: _concatenated([getattr(piece, name) for piece in pieces]) for name in names})
    return whole.pin_memory() if torch.cuda.is_available() else whole


def _concatenated(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if isinstance(first, tuple):
        return tuple(itertools.chain.from_iterable(values))
    if isinstance(first, Mapping):
        return {name: torch.cat([value[name] for value in values]) for name in first}
    return first  # the seed, or what no piece has
