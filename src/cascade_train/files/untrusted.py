"""Files, JSON and YAML from outside, read within bounds, since a few bytes may stand for more than the memory holds.

Any fault of a text is a ValueError.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

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


def open_regular(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Open a regular file to read, without waiting for a pipe; `within` a folder, no link leads to it.

    Raises:
        OSError: it is not there, or may not be read; within a folder, also that it is a link.
        ValueError: it is a pipe, a device or a folder, or lies elsewhere.
    """
    folder = Path() if within is None else Path(os.path.normpath(within))
    parts = [str(path)] if within is None else Path(os.path.normpath(path)).relative_to(folder).parts
    follow = 0 if within is None else os.O_NOFOLLOW
    handle = os.open(folder, os.O_RDONLY)
    try:
        for part in parts:
            handle, outer = os.open(part, os.O_RDONLY | os.O_NONBLOCK | follow, dir_fd=handle), handle
            os.close(outer)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is no regular file")
        return os.fdopen(os.dup(handle), "rb")
    finally:
        os.close(handle)


def read_regular(path: Path, *, limit: int, within: Path | None = None) -> bytes:
    """Return what a regular file of at most `limit` bytes holds, opened as by `open_regular`.

    Raises:
        ValueError: it is not there, lies elsewhere, is a link, a pipe or a folder, or is larger.
    """
    try:
        with open_regular(path, within=within) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ValueError(f"{path} is no regular file that can be read here ({error.strerror})") from error
    if len(content) > limit:
        raise ValueError(f"{path} has more than {limit} bytes")
    return content


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


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file with one in each line, never all at once; what cannot be read is left out."""
    try:
        with path.open("rb") as lines:
            for line in lines:
                with suppress(ValueError):
                    row = read_json(line)
                    if isinstance(row, dict):
                        yield row
    except OSError:  # there is none, or it may not be read
        return


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
