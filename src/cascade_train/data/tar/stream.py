"""The samples of one tar read from its beginning to its end: a file, a compressed one, or the output of a command.

Only bytes of usable samples are kept, one sample at a time. Nothing is unpacked to a disk.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import select
import shutil
import signal
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from cascade_train.data.tar.files import PIPE, Tar
from cascade_train.data.tar.members import IMAGE_EXTENSIONS, Dropped, Forward, Member, samples
from cascade_train.errors import ConfigError, RunError

_DECOMPRESSORS: Mapping[str, Callable[..., Any]] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
_BUFFER_BYTES = 1024**2
_END_SECONDS = 5.0
_SHOWN_CHARACTERS = 500


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

    opened = _output_of(tar, timeout_seconds) if tar.store is None else _stored(tar)
    with opened as file:
        yield from samples(tar.name, Forward(file, seekable=tar.has_places), take, dropped)


@contextmanager
def _stored(tar: Tar) -> Iterator[Any]:
    """Open a stored tar; errors name it."""
    try:
        with tar.open() as stored:
            yield stored if tar.compression is None else _Decompressed(tar, stored)
    except OSError as error:
        raise _damaged(tar, error) from error


class _Decompressed:
    """What a compressed tar holds. Its damage is an error here, before tarfile gives it other names."""

    def __init__(self, tar: Tar, stored: IO[bytes]) -> None:
        assert tar.compression is not None, f"{tar.name} is not compressed"
        self._tar, self._file = tar, _DECOMPRESSORS[tar.compression](stored)

    def read(self, size: int) -> bytes:
        try:
            content: bytes = self._file.read(size)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise _damaged(self._tar, error) from error
        return content


def _damaged(tar: Tar, error: Exception) -> RunError:
    return RunError(f"data.urls: {tar.item.url} cannot be read to its end: {error}; copy it again")


@contextmanager
def _output_of(tar: Tar, timeout_seconds: float | None) -> Iterator[Any]:
    """Run the shell command of a pipe and give its output; a block that ends early ends the command too."""
    command = tar.item.url.removeprefix(PIPE)
    with tempfile.TemporaryFile() as messages, _running(command, messages) as process:
        assert process.stdout is not None, "its output is piped"
        raw = _Output(process.stdout.fileno(), tar.name, timeout_seconds)
        try:
            with io.BufferedReader(raw, buffer_size=_BUFFER_BYTES) as file:
                yield file
                if file.read(1):
                    raise RunError(f"data.urls: {tar.name} goes on after the end of its tar; give one tar for each")
        except ConfigError:  # a tar that is cut short: the command's end says why
            _refuse_failed(process, tar.name, messages)
            raise
        _refuse_failed(process, tar.name, messages)


@contextmanager
def _running(command: str, messages: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    bash = shutil.which("bash")  # in which a failure of each part of `a | b` counts
    arguments = ["sh", "-c", command] if bash is None else [bash, "-o", "pipefail", "-c", command]
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=messages,
        bufsize=0,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


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
