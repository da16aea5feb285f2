"""The rule for what a command writes to `out=`: it replaces what it wrote itself, else only with `overwrite=true`.

A command recognises its work: single files carry its name, folders a record of the files that it wrote. Whatever else
lies in a folder is never touched.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from cascade_train.errors import ConfigError
from cascade_train.files.durable import remove_abandoned, replacing, write_durably
from cascade_train.files.untrusted import bounded_lines, read_json, read_mapping

EXPORTER = "export"
"""Command that trainings, too, write exports as."""

MARK = "cascade_train"
"""Entry of a safetensors header that names the command which wrote the file."""

RECORD = ".cascade_train.json"
"""File in a folder: the command that wrote it, and the sizes of its files by name."""

_LONGEST_HEADER = 32 * 2**20


def generator(command: str) -> str:
    """Line in the head of a page that names the command which wrote it."""
    return f'<meta name="generator" content="cascade-train {command}">'


def check_output(
    path: Path,
    command: str,
    *,
    key: str = "out",
    is_folder: bool = False,
    overwrite: bool = False,
    inputs: Iterable[str] = (),
    names: Iterable[str] = (),
    columns: Sequence[str] = (),
) -> None:
    """Refuse a file or folder that cannot be written, is read by the command, or holds what it did not write.

    `inputs` are what the command reads, `names` patterns of the files that it writes into a folder, `columns` the keys
    of each row of a list. Only `path` that exists and is not the command's own work yields to `overwrite`.
    """
    what, names = f"{key}={path}", tuple(names)
    for source in inputs:
        given = Path(source).expanduser()
        if path.exists() and given.exists() and _reads(given.resolve(), path.resolve(), names):
            raise ConfigError(f"{what}: would replace {source}, which is read. Name another {key}=.")
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if there != path and not there.is_dir():
        raise ConfigError(f"{what} cannot be written: {there} is a file. Name another {key}=.")
    if not os.access(there if there.is_dir() else there.parent, os.W_OK):
        raise ConfigError(f"{what} cannot be written: {there} is read-only. Name another {key}=.")
    if not os.path.lexists(path):
        return
    if path.is_dir() != is_folder:
        there_is, wanted = ("a file", "a folder") if is_folder else ("a folder", "a file")
        raise ConfigError(f"{what} is {there_is}, and {wanted} is written. Name another {key}=.")
    if not (overwrite or (has_columns(path, columns) if columns else is_written_by(path, command))):
        raise ConfigError(
            f"{what} exists, and is not as cascade-train {command} left it. Name another {key}=, or replace its "
            "files by overwrite=true, which touches no others."
        )


def check_unused(folder: Path, *own: str) -> None:
    """Refuse a folder that a command is to fill which holds other files than its `own`; hidden ones do not count."""
    others = sorted(path.name for path in folder.iterdir() if path.name not in own and not path.name.startswith("."))
    if others:
        raise ConfigError(f"out={folder} holds {others[0]}, which this command did not write. Name another out=.")


def _reads(given: Path, path: Path, names: tuple[str, ...]) -> bool:
    is_named = given.parent == path and any(fnmatch(given.name, name) for name in names)
    return path.samefile(given) or given in path.parents or is_named


def is_written_by(path: Path, command: str) -> bool:
    """Whether a file was written by a command, or a folder is empty or holds its files unchanged."""
    if path.is_dir():
        return not any(path.iterdir()) or _recorded(path, command) is not None
    if path.suffix == ".safetensors":
        return _header(path).get(MARK) == command
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return generator(command).encode() in file.read(4096)


def has_columns(path: Path, columns: Sequence[str]) -> bool:
    """Whether each line of a file is a JSON object with just these keys, in their order."""
    if not path.is_file():
        return False
    with suppress(OSError, ValueError, TypeError), path.open("rb") as file:
        return all([*read_json(line)] == [*columns] for line in bounded_lines(file, f"{path}"))
    return False


def _header(path: Path) -> dict[str, str]:
    with suppress(OSError, ValueError, AttributeError), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size <= _LONGEST_HEADER:
            return dict(json.loads(file.read(size)).get("__metadata__", {}))
    return {}


def _recorded(folder: Path, command: str) -> dict[str, int] | None:
    """Sizes of the files in a folder that a command wrote; None where there is no record, or one has changed."""
    place = folder / RECORD
    record = read_mapping(place, command=str, files=dict)
    if record.get("command") != command:
        return None
    written, files = place.stat().st_mtime_ns, dict[str, int](record.get("files", {}))
    for name, size in files.items():
        if ".." in Path(name).parts or Path(name).is_absolute():
            return None
        if (folder / name).is_file():
            status = (folder / name).stat()
            if status.st_size != size or status.st_mtime_ns > written:
                return None
    return files


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a hidden file name beside `path` that takes its place when the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent)
    was_there = os.path.lexists(path)
    with replacing(path, racing=True) as beside:
        yield beside
        if os.path.lexists(path) and not was_there:
            raise FileExistsError(errno.EEXIST, "another process has written it meanwhile")


@contextmanager
def replaced_folder(folder: Path, command: str) -> Iterator[Path]:
    """Yield an empty hidden folder beside `folder` whose files are moved into it when the block succeeds.

    Files of the command's that it no longer writes are removed, others stay.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent)
    beside = folder.with_name(f".partial-{uuid.uuid4().hex[:8]}")
    beside.mkdir()
    try:
        yield beside
        files = {path.relative_to(beside): path.stat().st_size for path in beside.rglob("*") if path.is_file()}
        record = {"command": command, "files": {str(name): size for name, size in sorted(files.items())}}
        write_durably(beside / RECORD, json.dumps(record, indent=1) + "\n")
        if not folder.is_dir() or not any(folder.iterdir()):
            beside.rename(folder)
        else:
            _move(beside, [*files, Path(RECORD)], folder, command)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time write into a folder, where the file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _move(beside: Path, names: list[Path], folder: Path, command: str) -> None:
    with locked(folder):
        before = _recorded(folder, command) or {}
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (beside / name).replace(folder / name)
        remove_files(folder, {Path(name) for name in before} - {*names})


def remove_files(folder: Path, names: Iterable[Path]) -> None:
    """Remove files of a folder, and the folders in it that this leaves empty."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        for parent in name.parents[:-1]:
            with suppress(OSError):
                (folder / parent).rmdir()


def remove_written(path: Path, command: str) -> None:
    """Remove a file that a command wrote, or its files from a folder, which goes too where that leaves it empty."""
    if path.is_dir():
        if (files := _recorded(path, command)) is not None:
            remove_files(path, [*map(Path, files), Path(RECORD)])
            with suppress(OSError):
                path.rmdir()
    elif path.is_file() and is_written_by(path, command):
        path.unlink()
