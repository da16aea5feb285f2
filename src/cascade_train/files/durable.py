"""The atomic write: a file is written beside its final name, synced to the disk, renamed; and plain values as YAML."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from cascade_train.files.untrusted import read_regular

_PARTIAL, _DAY = ".partial", 24 * 3600.0
_DUMPER: Any = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Errors of file systems that cannot sync a directory; they keep names in order by other means."""


def sync(path: Path) -> None:
    """Sync a file's content, or the names in a directory, to the disk; raise OSError if that fails."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path, *, racing: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yield a hidden path beside `path`, with its suffix; the file written there replaces `path` in one step.

    A crash leaves the old file or the new one. If the block fails, the old file stays and the new one is removed.
    `racing`: several processes may write the file at once; each then has a hidden path of its own. `durable=False`, for
    what is checked before it is used or can be made again: nothing is synced.
    """
    name = f"-{uuid.uuid4().hex[:8]}{path.suffix}" if racing else f".{path.name}"
    beside = path.with_name(f"{_PARTIAL}{name}")
    try:
        yield beside
        if durable:
            sync(beside)
        beside.replace(path)
    finally:  # after a signal too
        beside.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def remove_abandoned(folder: Path) -> None:
    """Remove from a folder what killed writers left in it, files and folders: what nobody wrote to for a day."""
    for left in folder.glob(f"{_PARTIAL}-{'[0-9a-f]' * 8}*"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - _DAY:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def write_durably(path: Path, text: str, *, racing: bool = False) -> None:
    """Replace the file at `path` by `text` (UTF-8). See `replacing`."""
    with replacing(path, racing=racing) as beside:
        beside.write_text(text, encoding="utf-8")


def append_durably(path: Path, text: str) -> None:
    """Append `text` (UTF-8) to the file at `path`, created if missing, and sync it to the disk.

    A pipe that nobody reads is an OSError.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
    with os.fdopen(handle, "a", encoding="utf-8") as file:
        file.write(text)
    sync(path)


def read_whole_lines(path: Path, *, errors: str = "replace") -> list[str]:
    """Return the lines of a file (UTF-8), none if it is missing; a last line torn by a crash is cut off the file."""
    if not path.is_file():
        return []
    text = read_regular(path, limit=sys.maxsize).decode(errors=errors)
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_durably(path, whole)
    return whole.splitlines()


def to_yaml(value: Any, *, allow_unicode: bool = False) -> str:
    """Return a YAML text of nested dicts, lists and plain values, keys in their order."""
    write = partial(yaml.dump, value, sort_keys=False, allow_unicode=allow_unicode)
    try:
        text: str = write(Dumper=_DUMPER)
    except UnicodeEncodeError:  # half a character of UTF-16, which libyaml does not escape
        text = write(Dumper=yaml.SafeDumper)
    return text
