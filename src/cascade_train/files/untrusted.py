"""The door for files that this process did not write: regular ones alone, of bounded size, depth and lines.

A few bytes may stand for more than the memory holds. A file's fault is a ConfigError, a text's alone a ValueError.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from types import UnionType
from typing import Any

import yaml

from cascade_train.errors import ConfigError

WHOLE_BYTES = 32 * 2**20
"""Of a file that is read whole: ten times the manifest of a checkpoint of 10,000 ranks."""

LINES_BYTES, LINE_BYTES = 8 * 2**30, 4 * 2**20
"""Of a file that is read line by line, and of a line: ten times the metrics of a million steps, and a batch's names."""

PICTURE_BYTES = 2**30

Kind = type | UnionType

REMEDY = "Give another file, or put back a whole copy of it."

MAX_DEPTH = 50
"""Levels of nested lists and mappings, so that recursion over values is safe."""

MAX_DIGITS = 1000
"""Of an integer in YAML; for JSON Python has a limit of its own."""

INTEGER = "tag:yaml.org,2002:int"

FAST_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""For a text in which there is nothing to refuse: the same values, many times as fast."""


class _Loader(yaml.SafeLoader):
    """Plain values without aliases, which can multiply a text."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one value with its children."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{event.anchor[:20]}; write out what it stands for")
        self._depth += 1
        _refuse_deeper(self._depth)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and node.tag == INTEGER and len(node.value) > MAX_DIGITS:
            raise ValueError(f"it holds a number of {len(node.value)} digits")
        return node


def open_regular(path: Path, *, limit: int = sys.maxsize, within: Path | None = None) -> BufferedReader:
    """Open a regular file of at most `limit` bytes, without waiting for a pipe; `within` a folder no link leads to it.

    Raises:
        OSError: it is not there, or the system refuses it, such as a link below `within`.
        ValueError: it is a pipe, a device or a folder, lies elsewhere, or is larger.
    """
    file = _opened(path, within)
    if os.fstat(file.fileno()).st_size > limit:
        file.close()
        raise ValueError(f"it has more than {limit} bytes")
    return file


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path} is no regular file that can be read here ({getattr(error, 'strerror', None) or error}). {REMEDY}"


def _opened(path: Path, within: Path | None) -> BufferedReader:
    folder = Path() if within is None else Path(os.path.normpath(within))
    parts = [str(path)] if within is None else Path(os.path.normpath(path)).relative_to(folder).parts
    follow = 0 if within is None else os.O_NOFOLLOW
    handle = os.open(folder, os.O_RDONLY)
    try:
        for part in parts:
            handle, outer = os.open(part, os.O_RDONLY | os.O_NONBLOCK | follow, dir_fd=handle), handle
            os.close(outer)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("a pipe, a device or a folder")
        return os.fdopen(os.dup(handle), "rb")
    finally:
        os.close(handle)


def read_regular(path: Path, *, limit: int = WHOLE_BYTES, within: Path | None = None) -> bytes:
    """Return what a file holds, opened as by `open_regular`; every fault is a ConfigError."""
    try:
        with open_regular(path, limit=limit, within=within) as file:
            return file.read(os.fstat(file.fileno()).st_size)
    except (OSError, ValueError) as error:
        raise ConfigError(_unreadable(path, error)) from error


def load_mapping(path: Path, **kinds: Kind) -> dict[str, Any]:
    """Return the mapping in a JSON file, or by its ending a YAML file, which has values of some kinds.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    content = read_regular(path)
    try:
        value = (read_yaml if path.suffix == ".yaml" else read_json)(content)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}. {REMEDY}") from error
    if not isinstance(value, dict) or kinds.keys() - _of_kinds(value, kinds):
        raise ConfigError(f"{path} is damaged: it is no mapping{' with ' * bool(kinds)}{', '.join(kinds)}. {REMEDY}")
    return value


def read_mapping(path: Path, **kinds: Kind) -> dict[str, Any]:
    """Return the mapping in a file, without values of other types than `kinds`; empty where it cannot be read."""
    try:
        return _of_kinds(load_mapping(path), kinds)
    except ConfigError:
        return {}


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, none where it is not there, never all at once; too long ones in pieces.

    Raises:
        ConfigError: it cannot be read.
    """
    if os.path.lexists(path):
        try:
            with open_regular(path, limit=LINES_BYTES) as file:
                yield from iter(partial(file.readline, LINE_BYTES), b"")
        except (OSError, ValueError) as error:
            raise ConfigError(_unreadable(path, error)) from error


def read_rows(path: Path, **kinds: Kind) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file with one in each line, without values of other types than `kinds`.

    What cannot be read is left out.
    """
    with suppress(ConfigError):
        for line in read_lines(path):
            with suppress(ValueError):
                row = read_json(line)
                if isinstance(row, dict):
                    yield _of_kinds(row, kinds)


def _of_kinds(row: dict[str, Any], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Return a mapping without values of other types than `kinds`."""
    return {key: value for key, value in row.items() if isinstance(value, kinds.get(key, object))}


def read_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or does not fit into memory.
    """
    try:
        value = json.loads(text)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"it cannot be read ({type(error).__name__})") from error
    _check_depth(value)
    return value


def read_yaml(text: str | bytes) -> Any:
    """Parse a YAML text.

    Raises:
        ValueError: it is no YAML, has aliases or too long a number, is nested too deeply, or does not fit into memory.
    """
    if _is_harmless(text):
        with suppress(ValueError):  # said below, in words of PyYAML's own
            return _parsed(text, "get_single_data", FAST_LOADER)
    return _parsed(text, "get_single_data")


def check_yaml(text: str | bytes) -> None:
    """Check the structure of a YAML text for another reader; raise ValueError as `read_yaml` does."""
    if not _is_harmless(text):
        _parsed(text, "get_single_node")


def _is_harmless(text: str | bytes) -> bool:
    """Return whether libyaml, which is many times as fast, finds nothing in a text that `_Loader` might refuse."""
    depth = documents = 0
    try:
        for event in yaml.parse(text, FAST_LOADER):
            documents += isinstance(event, yaml.DocumentStartEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            is_long = isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_DIGITS
            if is_long or documents > 1 or depth >= MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                return False
    except (yaml.YAMLError, ValueError, MemoryError):
        return False
    return True


def _parsed(text: str | bytes, what: str, kind: Any = _Loader) -> Any:
    """Return the result of a method of PyYAML, which raises errors of many kinds, such as for dates."""
    try:
        loader = kind(text)
        try:
            return getattr(loader, what)()
        finally:
            loader.dispose()
    except ValueError:
        raise
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{error.problem or error.context}{line}") from error
    except Exception as error:
        raise ValueError(f"it cannot be read ({type(error).__name__})") from error


def _check_depth(value: Any) -> None:
    level, depth = _children([value]), 1
    while level:
        _refuse_deeper(depth)
        level = [child for each in level for child in _children(each)]
        depth += 1


def _refuse_deeper(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _children(value: dict[str, Any] | list[Any]) -> list[Any]:
    """Return the mappings and lists within one."""
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]
