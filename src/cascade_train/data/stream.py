"""Tars that are only read forward, the output of a command or compressed: their samples, dealt to readers.

Of a tar one sample at a time is in memory, and nothing is unpacked to a disk.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import itertools
import logging
import lzma
import os
import signal
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from cascade_train.data.index.row_filter import PASSED, RowFilters
from cascade_train.data.order.plan import permutation
from cascade_train.data.tar.files import PIPE, Tar
from cascade_train.data.tar.members import IMAGE_EXTENSIONS, Dropped, Forward, Member, samples
from cascade_train.errors import ConfigError, RunError
from cascade_train.redaction import printable

_SAMPLES_OF_A_TAR = 2**32
_DECOMPRESSORS: Mapping[str, Callable[..., Any]] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
_END_SECONDS = 5.0
_SHOWN_CHARACTERS = 500
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamSample:
    """A sample in memory."""

    number: int  # its identity, the same in each epoch
    key: str  # its name in messages
    parts: Mapping[str, bytes]  # see `read_tar`


@dataclass(frozen=True, eq=False, kw_only=True)
class Streams:
    """Tars in an order of their own in each epoch."""

    tars: Sequence[Tar]
    rows: Sequence[int]  # of the tars, which take part
    seed: int
    buffer_samples: int  # mixed with each other
    filters: RowFilters
    needed: str  # the part without which a sample is left out, beside its picture
    keeps_json: bool  # whether captions need the json once the filters have judged it
    max_file_bytes: int | None  # of a part; of a longer one a byte more is read, so that it counts as too long

    def blocks(self, epoch: int, reader: int, readers: int) -> Iterator[list[StreamSample]]:
        """Yield the samples of an epoch that come to one of several readers, mixed within blocks."""
        samples = self._samples(epoch, reader, readers)
        for number in itertools.count():
            if not (block := list(itertools.islice(samples, self.buffer_samples))):
                return
            order = permutation(len(block), self.seed, epoch, f"stream/{reader}/{number}")
            yield [block[place] for place in order.tolist()]

    def _samples(self, epoch: int, reader: int, readers: int) -> Iterator[StreamSample]:
        """Deal whole tars, as many to each reader; what remains is dealt sample by sample, and read by all."""
        order = permutation(len(self.rows), self.seed, epoch, "streams").tolist()
        dealt = len(order) // readers * readers
        for place, row in enumerate(self.rows[number] for number in order):
            if place < dealt and place % readers != reader:
                continue
            for number, (key, parts) in enumerate(self._usable(self.tars[row], epoch)):
                if place < dealt or number % readers == reader:
                    name = printable(f"{self.tars[row].name}:{key}")
                    yield StreamSample(number=row * _SAMPLES_OF_A_TAR + number, key=name, parts=parts)

    def _usable(self, tar: Tar, epoch: int) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield the samples of a tar that have a caption and pass the filters; log once what else it holds."""
        dropped = Dropped()
        for key, parts in read_tar(tar, max_file_bytes=self.max_file_bytes, dropped=dropped):
            if self.needed not in parts:
                dropped.count(key, parts, no_image=False)
            elif not len(self.filters) or set(self.filters.verdicts(parts.get("json"))) == {PASSED}:
                yield key, parts if self.keeps_json else {part: parts[part] for part in parts if part != "json"}
        if dropped.examples and epoch == 0:
            _log.warning("%s: left out %s", tar.name, dropped.text(tar.parts[self.needed]))


def read_tar(tar: Tar, *, max_file_bytes: int | None, dropped: Dropped) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and parts of each sample, as `members.samples`; a RunError where the source fails."""
    wanted = {*IMAGE_EXTENSIONS, *tar.parts.values()}

    def take(member: Member) -> bytes:
        if member.extension not in wanted:
            return b""
        size = member.size if max_file_bytes is None else min(member.size, max_file_bytes + 1)
        if len(content := member.read(size)) < size:
            raise ConfigError(f"data.urls: {tar.name} ends within {member.key}.{member.extension}: copy it again")
        return content

    with _run_pipe(tar) if tar.store is None else _open_stored(tar) as file:
        yield from samples(tar.name, Forward(file, seekable=tar.is_indexable), take, tar.parts, dropped)


@contextmanager
def _open_stored(tar: Tar) -> Iterator[Any]:
    try:
        with tar.open() as stored:
            yield stored if tar.compression is None else _DECOMPRESSORS[tar.compression](stored)
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise RunError(f"data.urls: {tar.item.url} cannot be read to its end: {error}; copy it again") from error


@contextmanager
def _run_pipe(tar: Tar) -> Iterator[IO[bytes]]:
    """Run the shell command of a pipe and yield its output; a block that ends early ends the command too."""
    command = ["bash", "-o", "pipefail", "-c", tar.item.url.removeprefix(PIPE)]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "start_new_session": True}
    with tempfile.TemporaryFile() as messages, subprocess.Popen(command, stderr=messages, **options) as process:
        assert process.stdout is not None, "its output is piped"
        try:
            yield process.stdout
            if process.stdout.read(1):
                raise RunError(f"data.urls: {tar.name} goes on after the end of its tar; give one tar for each")
            _refuse_failed(process, tar.name, messages)
        except ConfigError:  # a tar that is cut short: the command's end says why
            _refuse_failed(process, tar.name, messages)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _refuse_failed(process: subprocess.Popen[bytes], name: str, messages: IO[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(_END_SECONDS)
        if code != 0:
            messages.seek(0)
            last = messages.read().decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
            raise RunError(f"data.urls: {name} ended with code {code}: {last or 'no error message'}")
