"""One logical stream: an endless sequence of samples of tars that are only read forward, and the place in it.

A function of (tars, seed, number of streams) alone: ranks, workers and resumes do not change it. Batches and workers
belong in loading/stream_feed.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cascade_train.data.index.row_filter import PASSED, RowFilters
from cascade_train.data.order.plan import permutation
from cascade_train.data.tar.files import Tar
from cascade_train.data.tar.members import Dropped
from cascade_train.data.tar.stream import stream_samples
from cascade_train.errors import RunError
from cascade_train.options import Free, check_least
from cascade_train.redaction import printable

MEBIBYTE = 1024**2
_SAMPLES_OF_A_TAR = 2**32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """How streams are read: in blocks of at most this many samples and mebibytes."""

    buffer_samples: int = 256
    buffer_mib: int = 64
    max_file_mib: Free[int] = 128
    timeout_seconds: Free[float | None] = 300.0

    def __post_init__(self) -> None:
        for name in ("buffer_samples", "buffer_mib", "max_file_mib"):
            check_least(f"data.stream.{name}", getattr(self, name), 1, "it is a size")
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ValueError(f"data.stream.timeout_seconds={self.timeout_seconds} must be above 0; null = no limit")


class Cursor(NamedTuple):
    """A place in a logical stream: a block, and how many of its samples were taken."""

    epoch: int = 0
    place: int = 0  # among the stream's tars of the epoch, where the block begins
    sample: int = 0  # of that tar, where the block begins; counts usable samples that pass the filters
    taken: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamSample:
    """A sample of a block."""

    number: int  # its identity, the same in each epoch
    epoch: int  # in which it was read
    key: str  # its name in messages
    parts: Mapping[str, bytes]  # see `stream_samples`


@dataclass(frozen=True, eq=False, kw_only=True)
class Take:
    """Samples taken together."""

    samples: list[StreamSample]
    blocks: list[StreamSample]  # all samples of the blocks that they came from
    cursor: Cursor  # the place behind them


@dataclass(frozen=True, eq=False)
class Stream:
    """One of several streams among which the tars of each epoch are dealt."""

    tars: Sequence[Tar]
    rows: Sequence[int]  # of the tars, which take part
    number: int  # of this stream, from 0
    streams: int  # how many there are, at most one for each tar
    seed: int
    spec: StreamSpec
    filters: RowFilters
    keeps_json: bool  # whether captions need the json once the filters have judged it

    def takes(self, start: Cursor, count: int) -> Iterator[Take]:
        """Yield `count` samples at a time, without end, from a place on.

        The tar in which that place lies is read again from its beginning, since it cannot be entered elsewhere.
        """
        samples: list[StreamSample] = []
        blocks: list[StreamSample] = []
        for begin, block in self._blocks(start):
            blocks = blocks + block if samples else block
            for taken, sample in enumerate(block[begin.taken :], start=begin.taken + 1):
                samples.append(sample)
                if len(samples) == count:
                    yield Take(samples=samples, blocks=blocks, cursor=begin._replace(taken=taken))
                    samples, blocks = [], block

    def _blocks(self, start: Cursor) -> Iterator[tuple[Cursor, list[StreamSample]]]:
        """Yield each block, mixed, with where it begins; no block reaches into another epoch."""
        cursor = start
        while True:
            empty = cursor.place == 0 and cursor.sample == 0
            block, size = list[StreamSample](), 0
            for sample, behind in self._samples(cursor):
                block.append(sample)
                size += sum(map(len, sample.parts.values()))
                if len(block) == self.spec.buffer_samples or size >= self.spec.buffer_mib * MEBIBYTE:
                    yield cursor, self._mixed(block, cursor)
                    cursor, block, size, empty = behind, [], 0, False
            if block:
                yield cursor, self._mixed(block, cursor)
            elif empty:
                names = ", ".join(self.tars[row].name for row in self._order(cursor.epoch)[:3])
                raise RunError(
                    f"data.urls: no sample of {names} can be used in epoch {cursor.epoch}; see the log for why"
                )
            cursor = Cursor(epoch=cursor.epoch + 1)

    def _samples(self, cursor: Cursor) -> Iterator[tuple[StreamSample, Cursor]]:
        """Yield the samples of the rest of an epoch, each with the position after it."""
        for place, row in enumerate(self._order(cursor.epoch)):
            if place < cursor.place:
                continue
            first = cursor.sample if place == cursor.place else 0
            for sample, (key, parts) in enumerate(self._passing(row, cursor.epoch)):
                if sample >= first:
                    number = row * _SAMPLES_OF_A_TAR + sample
                    name = printable(f"{self.tars[row].name}:{key}")
                    behind = Cursor(epoch=cursor.epoch, place=place, sample=sample + 1)
                    yield StreamSample(number=number, epoch=cursor.epoch, key=name, parts=parts), behind

    def _passing(self, row: int, epoch: int) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield the samples of a tar that pass the filters; log once what it holds besides samples."""
        tar, spec = self.tars[row], self.spec
        dropped, largest = Dropped(caption=tar.caption), spec.max_file_mib * MEBIBYTE
        samples = stream_samples(tar, max_file_bytes=largest, timeout_seconds=spec.timeout_seconds, dropped=dropped)
        for key, parts in samples:
            if not len(self.filters) or all(each == PASSED for each in self.filters.verdicts(parts.get("json"))):
                yield key, parts if self.keeps_json else {part: parts[part] for part in parts if part != "json"}
        if dropped.examples and epoch == 0:
            _log.warning("%s: left out %s", tar.name, dropped.text())

    def _order(self, epoch: int) -> list[int]:
        """Return this stream's tars of an epoch; over all streams each tar comes once."""
        order = permutation(len(self.rows), self.seed, epoch, "streams")
        return [self.rows[place] for place in order[self.number :: self.streams].tolist()]

    def _mixed(self, block: list[StreamSample], begin: Cursor) -> list[StreamSample]:
        purpose = f"stream/{self.number}/{begin.place}/{begin.sample}"
        return [block[place] for place in permutation(len(block), self.seed, begin.epoch, purpose).tolist()]
