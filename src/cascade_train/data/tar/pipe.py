"""The output of a command as a file that is read once, from its beginning to its end.

What the bytes mean is the caller's business; that the command ended well is checked here.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO

from cascade_train.errors import ConfigError, RunError
from cascade_train.redaction import redact_argument

_BUFFER_BYTES = 1024**2
_END_SECONDS = 5.0
_SHOWN_CHARACTERS = 500


@contextmanager
def piped(command: str, *, timeout_seconds: float | None) -> Iterator[BinaryIO]:
    """Run a shell command and give its output; a block that ends early ends the command too.

    Args:
        command: for bash where there is one, so that each part of `a | b` counts; else for sh.
        timeout_seconds: how long the command may give nothing; None = for ever.

    Raises:
        RunError: the command failed, gave nothing for too long, or goes on after all was read.
    """
    name = redact_argument(f"pipe:{command}")
    with tempfile.TemporaryFile() as told, _running(command, told) as process:
        assert process.stdout is not None, "its output is piped"
        raw = _Output(process.stdout.fileno(), name, timeout_seconds)
        try:
            with io.BufferedReader(raw, buffer_size=_BUFFER_BYTES) as file:
                yield file
                if file.read(1):
                    raise RunError(f"data.urls: {name} goes on after the end of its tar; give one tar for each")
        except ConfigError:  # a tar that is cut short: the command's end says why
            _refuse_failed(process, name, told)
            raise
        _refuse_failed(process, name, told)


@contextmanager
def _running(command: str, told: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    bash = shutil.which("bash")
    arguments = ["sh", "-c", command] if bash is None else [bash, "-o", "pipefail", "-c", command]
    process = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=told, bufsize=0, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _refuse_failed(process: subprocess.Popen[bytes], name: str, told: IO[bytes]) -> None:
    """Check how the command ended; one that has not ended says nothing.

    Raises:
        RunError: it ended with another code than 0.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(_END_SECONDS)
        if code != 0:
            told.seek(0)
            last = told.read().decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
            raise RunError(f"data.urls: {name} ended with code {code}: {last or 'it said nothing'}")


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
                f"data.urls: {self._name} gave nothing for {self._timeout_seconds:g} s; see why, or raise"
                " data.stream.timeout_seconds"
            )
        content = os.read(self._descriptor, len(buffer))
        buffer[: len(content)] = content
        return len(content)
