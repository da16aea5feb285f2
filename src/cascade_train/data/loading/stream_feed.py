"""Batches of one rank from tars that are only read forward, with a place in each logical stream to resume from.

Each stream fills the same slots of every global batch, so that ranks and workers only decide who reads which stream.
The order within a stream is decided in stream.py; how a sample is decoded in loading/worker.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from cascade_train.batch import Batch, Unreadable
from cascade_train.data.decoding.jpeg import fast_jpeg_decoder
from cascade_train.data.loading.feed import FeedRequest
from cascade_train.data.loading.in_hand import InHand
from cascade_train.data.loading.loader import check_batch_sizes
from cascade_train.data.loading.skipped import Skipped
from cascade_train.data.loading.worker import Failure, MicroBatches
from cascade_train.data.loading.worker_process import begin_worker
from cascade_train.data.loading.worker_results import Receiver
from cascade_train.data.order.plan import Step
from cascade_train.data.source import Source
from cascade_train.data.stream import Cursor, Held, Stream, Take
from cascade_train.errors import ConfigError, RunError

ORDER_VERSION = 1
MOST_STREAMS = 64
_log = logging.getLogger(__name__)


class Part(NamedTuple):
    """What one stream gives to one rank's share of every global batch.

    Attributes:
        stream: its number.
        cuts: places in what the stream gives to a global batch, at which this rank's pieces begin and end.
    """

    stream: int
    cuts: list[int]


class Item(NamedTuple):
    """What a worker makes of one stream for one global batch.

    Attributes:
        stream: its number.
        cursor: the place behind the samples.
        pieces: this rank's samples, cut where micro-batches end.
    """

    stream: int
    cursor: Cursor
    pieces: list[Batch]


class StreamFeed:
    """An endless iterator over optimizer steps, each a list of this rank's micro-batches. See `feed.Feed`.

    Args:
        source: whose captions, crops and workers are used.
        request: what is asked for; its rows are tars.
        streams: all logical streams.
        identity: of what else decides the order, by name.

    Raises:
        ConfigError: the streams do not divide the global batch.
    """

    def __init__(
        self, source: Source, request: FeedRequest, streams: Sequence[Stream], identity: Mapping[str, str]
    ) -> None:
        check_batch_sizes(request.global_batch_size, request.micro_batch_size, request.ranks)
        self.position = 0
        self._request = request
        self._identity = {
            "order": f"streams-{ORDER_VERSION}",
            "index": request.index.digest,
            "rows": hashlib.sha256(request.rows.astype("<i8").tobytes()).hexdigest()[:16],
            "filters": request.index.filters or "none",
            "seed": str(request.seed),
            "streams": str(len(streams)),
            **identity,
        }
        self._cursors = {stream.number: Cursor() for stream in streams}
        self._skipped = Skipped(None, source.max_unreadable_share)
        parts = parts_of_rank(request, len(streams))
        self._own = [part.stream for part in parts]
        self._excluded = set[str]()
        items = _Items(self._cursors, source, request, [(streams[part.stream], part) for part in parts], self._excluded)
        workers = helpful_workers(source.num_workers, len(parts))
        if workers < source.num_workers:
            _log.info("Of %d workers %d are used: this rank reads %d streams.", source.num_workers, workers, len(parts))
        self._on_change = source.on_change
        self._receiver: Receiver[Item] = Receiver(_data_loader(source, items, workers), self._whereabouts)

    @property
    def skipped(self) -> list[Unreadable]:
        """The unreadable samples that this rank met, each once."""
        return self._skipped.each

    @property
    def samples_per_epoch(self) -> int:
        """How many samples take part: nobody knows.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "data.urls are streams, whose length nobody knows before they end: give train.max_steps instead of"
            " train.max_epochs, and hold out by validate.urls of tars that can be indexed instead of validate.share"
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step on one rank."""
        return self._request.global_batch_size // self._request.ranks // self._request.micro_batch_size

    def report(self) -> list[str]:
        """Return what is promised for streams."""
        return [
            f"The data are {len(self._cursors)} logical streams, since not all tars can be indexed: pictures are"
            " square, samples mix within blocks (data.stream), and nobody knows how many there are. Their sequence"
            " depends on the seed and the number of streams, not on ranks or workers; a resume is exact, and reads the"
            " tars that it was within from their beginning."
        ]

    def steps_of_epochs(self, epochs: int) -> int:
        """Return how many steps epochs take: nobody knows. See `samples_per_epoch`."""
        return self.samples_per_epoch * epochs

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """Return this rank's micro-batches of the next global batch."""
        pieces: list[Batch] = []
        behind = {}
        for stream in self._own:
            item = self._receiver.next()
            assert item.stream == stream, f"stream {item.stream} came in the place of {stream}"
            behind[stream] = item.cursor
            pieces += item.pieces
        micro_batches = _micro_batches(pieces, self._request.micro_batch_size)
        for batch in micro_batches:
            self._skipped.count(batch)
        self._cursors.update(behind)
        self.position += 1
        return micro_batches

    def seek(self, position: int) -> None:
        """Start over; streams know no other place that was not saved."""
        assert position == 0, "a stream is entered at its beginning, or where a state was taken"
        self._go_to(0, dict.fromkeys(self._cursors, Cursor()))

    def exclude(self, keys: Collection[str]) -> None:
        """Let others of their block stand in for samples from the next global batch on."""
        self._excluded.update(keys)
        self._receiver.restart()

    def close(self) -> None:
        """End the worker processes and their commands."""
        self._receiver.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in every stream, equal on all ranks. Collective where there are several."""
        mine = {stream: self._cursors[stream] for stream in self._own}
        known = {stream: place for places in self._request.gather(mine) for stream, place in places.items()}
        return {
            "position": self.position,
            "identity": " ".join(f"{name}={value}" for name, value in self._identity.items()),
            "global_batch_size": self._request.global_batch_size,
            "streams": [list(known[stream]) for stream in sorted(known)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken.

        Raises:
            ConfigError: it belongs to other streams, or to batches of another size.
        """
        changed = self._changes(state)
        cursors = {stream: Cursor(*place) for stream, place in enumerate(state.get("streams", []))}
        if changed and self._on_change == "refuse":
            raise ConfigError(
                f"the checkpoint's place in its streams does not fit this run: {'; '.join(changed)}. Set back what"
                " changed (data.urls, data.streams, data.stream, data.row_filters, run.seed, train.global_batch_size),"
                " or begin another epoch by data.on_change=restart"
            )
        if changed:
            epoch = 1 + max((cursor.epoch for cursor in cursors.values()), default=0)
            _log.warning("The streams begin epoch %d, since they changed: %s.", epoch, "; ".join(changed))
            cursors = dict.fromkeys(self._cursors, Cursor(epoch=epoch))
        self._go_to(state["position"], cursors)

    def _changes(self, state: Mapping[str, Any]) -> list[str]:
        saved = dict(pair.split("=", 1) for pair in state["identity"].split()) | {"batch": state["global_batch_size"]}
        own = {**self._identity, "batch": self._request.global_batch_size}
        return [f"{name} was {saved.get(name)}, is {value}" for name, value in own.items() if saved.get(name) != value]

    def _whereabouts(self) -> str:
        places = ", ".join(f"{stream}: {list(self._cursors[stream])}" for stream in self._own[:8])
        return f"This rank reads streams whose places are (epoch, tar, sample, taken) {places}; a command may be slow."

    def _go_to(self, position: int, cursors: Mapping[int, Cursor]) -> None:
        self.position = position
        self._cursors.update(cursors)
        self._receiver.restart()


def parts_of_rank(request: FeedRequest, streams: int) -> list[Part]:
    """Return which streams fill this rank's slots of a global batch, and where micro-batches cut them.

    Stream s fills slots [s c, (s + 1) c) of each global batch, c samples per stream; rank r takes its r-th share.

    Raises:
        ConfigError: the streams do not divide the global batch.
    """
    if request.global_batch_size % streams != 0:
        raise ConfigError(
            f"data.streams={streams} does not divide train.global_batch_size={request.global_batch_size}: each stream"
            " fills the same number of places in every batch; null chooses a number"
        )
    count = request.global_batch_size // streams
    share = request.global_batch_size // request.ranks
    cuts = range(request.rank * share, (request.rank + 1) * share + 1, request.micro_batch_size)
    parts = []
    for stream in range(streams):
        begin, end = max(stream * count, cuts[0]), min((stream + 1) * count, cuts[-1])
        if begin < end:
            places = sorted({begin, end, *(cut for cut in cuts if begin < cut < end)})
            parts.append(Part(stream=stream, cuts=[place - stream * count for place in places]))
    return parts


def choose_streams(global_batch_size: int, tars: int) -> int:
    """Return the largest number of streams that divides the global batch, at most one for each tar."""
    most = min(tars, global_batch_size, MOST_STREAMS)
    return max(streams for streams in range(1, most + 1) if global_batch_size % streams == 0)


def helpful_workers(wanted: int, streams: int) -> int:
    """Return how many workers take equal numbers of streams: the largest divisor up to `wanted`; 0 = none wanted."""
    return max((workers for workers in range(1, min(wanted, streams) + 1) if streams % workers == 0), default=0)


class _Items(IterableDataset[Item | Failure]):
    """The items of one rank, in the order of its streams; a worker makes every n-th.

    `cursors` and `excluded` are the feed's own: a new iterator begins at the places that are named then, without the
    samples whose keys are excluded then.
    """

    def __init__(
        self,
        cursors: Mapping[int, Cursor],
        source: Source,
        request: FeedRequest,
        streams: list[tuple[Stream, Part]],
        excluded: Collection[str],
    ) -> None:
        self._cursors, self._source, self._streams, self._excluded = cursors, source, streams, excluded
        self._index, self._seed, self._transform = request.index, request.seed, request.transform
        self._count = request.global_batch_size // len(cursors)

    def __iter__(self) -> Iterator[Item | Failure]:
        worker = get_worker_info()
        mine = self._streams if worker is None else self._streams[worker.id :: worker.num_workers]
        takes = {part.stream: stream.takes(self._cursors[part.stream], self._count) for stream, part in mine}
        while True:
            for _, part in mine:
                yield self._item(part, takes[part.stream])

    def _item(self, part: Part, takes: Iterator[Take]) -> Item | Failure:
        try:
            take = next(takes)
        except Exception as error:  # crosses a process border as text, raised again there
            cause = str(error) if isinstance(error, ConfigError | RunError) else f"{type(error).__name__}: {error}"
            return Failure(text=f"stream {part.stream}: {cause}", trace=traceback.format_exc())
        pieces = []
        for begin, end in zip(part.cuts, part.cuts[1:], strict=False):
            batch = self._batch(take, take.samples[begin:end])
            if isinstance(batch, Failure):
                return batch
            pieces.append(batch)
        return Item(stream=part.stream, cursor=take.cursor, pieces=pieces)

    def _batch(self, take: Take, samples: list[Held]) -> Batch | Failure:
        size = self._source.image_size
        in_hand = InHand.of(self._source, take.blocks)
        stand_ins = {(size, size): in_hand.rows}
        makes = MicroBatches(in_hand, in_hand.open(), stand_ins, self._seed, self._transform, self._excluded)
        rows, epochs = (np.array([getattr(held, name) for held in samples]) for name in ("number", "epoch"))
        return makes[Step(rows=rows, epochs=epochs, height=size, width=size)]


def _data_loader(source: Source, items: _Items, workers: int) -> DataLoader[Item | Failure]:
    if workers > 0:
        fast_jpeg_decoder()  # loaded once, before the workers fork
    return DataLoader(
        items,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=workers,
        multiprocessing_context=source.worker_start if workers > 0 else None,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=begin_worker,
        timeout=(source.max_wait_seconds or 0.0) if workers > 0 else 0.0,
    )


def _unchanged(item: Any) -> Any:
    return item


def _micro_batches(pieces: Sequence[Batch], size: int) -> list[Batch]:
    """Join pieces, which never reach over the end of a micro-batch, to micro-batches of a size."""
    micro_batches, waiting = [], list[Batch]()
    for piece in pieces:
        waiting.append(piece)
        if sum(map(len, waiting)) == size:
            micro_batches.append(_joined(waiting))
            waiting = []
    assert not waiting, f"{sum(map(len, waiting))} samples fill no micro-batch"
    return micro_batches


def _joined(pieces: Sequence[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    names = [field.name for field in dataclasses.fields(Batch)]
    whole = Batch(**{name: _whole([getattr(piece, name) for piece in pieces]) for name in names})
    return whole.pin_memory() if torch.cuda.is_available() else whole


def _whole(values: Sequence[Any]) -> Any:
    """Join the values of one field of a batch."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if isinstance(first, tuple):
        return tuple(itertools.chain.from_iterable(values))
    if isinstance(first, Mapping):
        return {name: torch.cat([value[name] for value in values]) for name in first}
    return first  # the seed, or what no piece has
