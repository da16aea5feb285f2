"""One logical stream: an endless sequence of samples of tars that are only read forward, and the place in it.

A function of (tars, seed, number of streams) alone: ranks, workers and resumes do not change it. A tar is a file, a
compressed one, or the output of a command; of it, one sample at a time is in memory, and nothing is unpacked to a disk.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import logging
import lzma
import os
import select
import shutil
import signal
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from cascade_train.data.index.row_filter import PASSED, RowFilters
from cascade_train.data.order.plan import permutation
from cascade_train.data.tar.files import PIPE, Tar
from cascade_train.data.tar.members import IMAGE_EXTENSIONS, Dropped, Forward, Member, samples
from cascade_train.errors import ConfigError, RunError
from cascade_train.options import Free, Positive, check_fields
from cascade_train.redaction import printable

MEBIBYTE = 1024**2
_SAMPLES_OF_A_TAR = 2**32
_DECOMPRESSORS: Mapping[str, Callable[..., Any]] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
_END_SECONDS = 5.0
_SHOWN_CHARACTERS = 500
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """How streams are read: in blocks of at most this many samples and mebibytes."""

    buffer_samples: Positive[int] = 256
    buffer_mib: Positive[int] = 64
    max_file_mib: Free[Positive[int]] = 128
    timeout_seconds: Free[Positive[float | None]] = 300.0

    def __post_init__(self) -> None:
        check_fields(self, "data.stream.")


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
        """Yield `count` samples at a time, without end, from a place on; its tar is read again from the beginning."""
        found: list[StreamSample] = []
        blocks: list[StreamSample] = []
        for begin, block in self._blocks(start):
            blocks = blocks + block if found else block
            for taken, sample in enumerate(block[begin.taken :], start=begin.taken + 1):
                found.append(sample)
                if len(found) == count:
                    yield Take(samples=found, blocks=blocks, cursor=begin._replace(taken=taken))
                    found, blocks = [], block

    def _blocks(self, start: Cursor) -> Iterator[tuple[Cursor, list[StreamSample]]]:
        """Yield each block, mixed, with where it begins; no block reaches into another epoch."""
        cursor = start
        while True:
            empty = cursor.place == 0 and cursor.sample == 0
            block, size = list[StreamSample](), 0
            for sample, behind in self._rest_of_epoch(cursor):
                block.append(sample)
                size += sum(map(len, sample.parts.values()))
                if len(block) == self.spec.buffer_samples or size >= self.spec.buffer_mib * MEBIBYTE:
                    yield cursor, self._shuffle(block, cursor)
                    cursor, block, size, empty = behind, [], 0, False
            if block:
                yield cursor, self._shuffle(block, cursor)
            elif empty:
                names = ", ".join(self.tars[row].name for row in self._rows_of_epoch(cursor.epoch)[:3])
                raise RunError(
                    f"data.urls: no sample of {names} can be used in epoch {cursor.epoch}; see the log for why"
                )
            cursor = Cursor(epoch=cursor.epoch + 1)

    def _rest_of_epoch(self, cursor: Cursor) -> Iterator[tuple[StreamSample, Cursor]]:
        """Yield the samples of the rest of an epoch, each with the position after it."""
        for place, row in enumerate(self._rows_of_epoch(cursor.epoch)):
            if place < cursor.place:
                continue
            first = cursor.sample if place == cursor.place else 0
            for sample, (key, parts) in enumerate(self._filtered_samples(row, cursor.epoch)):
                if sample >= first:
                    number = row * _SAMPLES_OF_A_TAR + sample
                    name = printable(f"{self.tars[row].name}:{key}")
                    behind = Cursor(epoch=cursor.epoch, place=place, sample=sample + 1)
                    yield StreamSample(number=number, epoch=cursor.epoch, key=name, parts=parts), behind

    def _filtered_samples(self, row: int, epoch: int) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield the samples of a tar that pass the filters; log once what it holds besides samples."""
        tar, spec = self.tars[row], self.spec
        dropped, largest = Dropped(), spec.max_file_mib * MEBIBYTE
        found = stream_samples(tar, max_file_bytes=largest, timeout_seconds=spec.timeout_seconds, dropped=dropped)
        for key, parts in found:
            if not len(self.filters) or all(each == PASSED for each in self.filters.verdicts(parts.get("json"))):
                yield key, parts if self.keeps_json else {part: parts[part] for part in parts if part != "json"}
        if dropped.examples and epoch == 0:
            _log.warning("%s: left out %s", tar.name, dropped.text(tar.caption))

    def _rows_of_epoch(self, epoch: int) -> list[int]:
        """Return the rows of this stream's tars in an epoch; over all streams each tar comes once."""
        order = permutation(len(self.rows), self.seed, epoch, "streams")
        return [self.rows[place] for place in order[self.number :: self.streams].tolist()]

    def _shuffle(self, block: list[StreamSample], begin: Cursor) -> list[StreamSample]:
        purpose = f"stream/{self.number}/{begin.place}/{begin.sample}"
        return [block[place] for place in permutation(len(block), self.seed, begin.epoch, purpose).tolist()]


def stream_samples(
    tar: Tar, *, max_file_bytes: int, timeout_seconds: float | None, dropped: Dropped
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and parts of each sample. Raises as `members.samples`.

    A RunError where a command fails, a store cannot be read, a compressed tar is damaged, or a file has more than
    `max_file_bytes`, since a few compressed bytes may claim to be more than memory holds.
    """
    wanted = {*IMAGE_EXTENSIONS, *tar.parts.values()}

    def take(member: Member) -> bytes:
        if member.extension not in wanted:
            return b""
        if member.size > max_file_bytes:
            raise RunError(
                f"data.urls: {tar.name}: {member.key}.{member.extension} has {member.size} bytes, more than"
                f" data.stream.max_file_mib={max_file_bytes >> 20}: remove it, or raise the limit"
            )
        content = member.read(member.size)
        if len(content) < member.size:
            raise ConfigError(f"data.urls: {tar.name} ends within {member.key}.{member.extension}: copy it again")
        return content

    with _run_pipe(tar, timeout_seconds) if tar.store is None else _open_stored(tar) as file:
        yield from samples(tar.name, Forward(file, seekable=tar.is_indexable), take, tar.parts, dropped)


@contextmanager
def _open_stored(tar: Tar) -> Iterator[Any]:
    try:
        with tar.open() as stored:
            yield stored if tar.compression is None else _Decompressed(tar, tar.compression, stored)
    except OSError as error:
        raise _damage_error(tar, error) from error


class _Decompressed:
    """A compressed tar. Its damage is an error here, before tarfile gives it other names."""

    def __init__(self, tar: Tar, compression: str, stored: IO[bytes]) -> None:
        self._tar, self._file = tar, _DECOMPRESSORS[compression](stored)

    def read(self, size: int) -> bytes:
        try:
            content: bytes = self._file.read(size)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise _damage_error(self._tar, error) from error
        return content


def _damage_error(tar: Tar, error: Exception) -> RunError:
    return RunError(f"data.urls: {tar.item.url} cannot be read to its end: {error}; copy it again")


@contextmanager
def _run_pipe(tar: Tar, timeout_seconds: float | None) -> Iterator[Any]:
    """Run the shell command of a pipe and yield its output; a block that ends early ends the command too."""
    command, bash = tar.item.url.removeprefix(PIPE), shutil.which("bash")
    arguments = ["sh", "-c", command]
    if bash is not None:  # in which a failure of each part of `a | b` counts
        arguments = [bash, "-o", "pipefail", "-c", command]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "bufsize": 0}
    with (
        tempfile.TemporaryFile() as messages,
        subprocess.Popen(arguments, stderr=messages, start_new_session=True, **options) as process,
    ):
        assert process.stdout is not None, "its output is piped"
        raw = _Output(process.stdout.fileno(), tar.name, timeout_seconds)
        try:
            with io.BufferedReader(raw, buffer_size=MEBIBYTE) as file:
                yield file
                if file.read(1):
                    raise RunError(f"data.urls: {tar.name} goes on after the end of its tar; give one tar for each")
            _refuse_failed(process, tar.name, messages)
        except ConfigError:  # a tar that is cut short: the command's end says why
            _refuse_failed(process, tar.name, messages)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _refuse_failed(process: subprocess.Popen[bytes], name: str, messages: IO[bytes]) -> None:
    """Raise where the command ended with another code than 0; one that still runs has not failed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(_END_SECONDS)
        if code != 0:
            messages.seek(0)
            last = messages.read().decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
            raise RunError(f"data.urls: {name} ended with code {code}: {last or 'no error message'}")


class _Output(io.RawIOBase):
    """A command's output; waiting for it has an end."""

    def __init__(self, descriptor: int, name: str, timeout_seconds: float | None) -> None:
        self._descriptor, self._name, self._timeout_seconds = descriptor, name, timeout_seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] # the interpreter passes a memoryview
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        if not waiting.poll(None if self._timeout_seconds is None else self._timeout_seconds * 1000):
            raise RunError(
                f"data.urls: {self._name} gave no output for {self._timeout_seconds:g} s; see why, or raise"
                " data.stream.timeout_seconds"
            )
        return os.readv(self._descriptor, [buffer])
