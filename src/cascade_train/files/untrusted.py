"""The door for files that this process did not write: regular ones alone, of bounded size, depth and lines.

A few bytes may expand to more than the memory holds. A file's fault is a ConfigError, a text's alone a ValueError.
The parsers of weights and data, and what a file means, must not live here.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO

import yaml

from cascade_train.errors import ConfigError, RunError
from cascade_train.redaction import LONGEST_NAME, printable, shortened

WHOLE_BYTES = 32 * 2**20
"""Of a file that is read whole: ten times the manifest of a checkpoint of 10,000 ranks."""

LINES_BYTES, LINE_BYTES = 8 * 2**30, 4 * 2**20
"""Of a file that is read line by line, and of a line: ten times the metrics of a million steps, and a batch's names."""

MAX_BYTES = 16 * 2**20
"""Of a JSON file or a line of data: ten times the longest that programs write, and below 1 GB as values."""

PICTURE_BYTES = 2**30

ValueType = type | UnionType

COPY = "copy or download it again"
WHOLE_COPY = "give another file, or put back a whole copy of it."

MAX_DEPTH = 50
"""Levels of nested lists and mappings, so that recursion over values is safe."""

MAX_DIGITS = 1000
"""Of an integer in YAML; for JSON Python has a limit of its own."""

YAML_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_INTEGER = "tag:yaml.org,2002:int"


def open_regular(path: Path, *, limit: int = sys.maxsize, within: Path | None = None) -> BufferedReader:
    """Open a regular file of at most `limit` bytes, without waiting for a pipe; `within` a folder no link leads to it.

    Raises:
        OSError: it is not there, or the system refuses it, such as a link below `within`.
        ValueError: it is a pipe, a device or a folder, lies elsewhere, or is larger.
    """
    folder = Path() if within is None else Path(os.path.normpath(within))
    parts = [str(path)] if within is None else Path(os.path.normpath(path)).relative_to(folder).parts
    follow = 0 if within is None else os.O_NOFOLLOW
    handle = os.open(folder, os.O_RDONLY)
    try:
        for part in parts:
            handle, outer = os.open(part, os.O_RDONLY | os.O_NONBLOCK | follow, dir_fd=handle), handle
            os.close(outer)
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("a pipe, a device or a folder")
        if status.st_size > limit:
            raise ValueError(f"it has more than {limit} bytes")
        return os.fdopen(os.dup(handle), "rb")
    finally:
        os.close(handle)


@contextmanager
def parsing(
    origin: str, fault: str = "cannot be read", remedy: str = COPY, *, passing: type[Exception] = RunError
) -> Iterator[None]:
    """Run a parser of a file within: damage, which raises errors of many kinds, is a ConfigError.

    Its text is `origin`, the file, with `fault`, the parser's message, and `remedy`. Errors of ours and `passing` pass.
    """
    try:
        yield
    except (ConfigError, RunError, passing):
        raise
    except Exception as error:
        text = str(getattr(error, "strerror", None) or error)
        reason = text if " " in text else f"{type(error).__name__} {text}".strip()
        raise ConfigError(f"{origin} {fault} ({printable(shortened(reason, LONGEST_NAME))}); {remedy}") from error


def _opening(path: Path) -> Any:
    return parsing(str(path), "is no regular file that can be read here", WHOLE_COPY)


def read_regular(path: Path, *, limit: int = WHOLE_BYTES, within: Path | None = None) -> bytes:
    """Return the content of a file, opened as by `open_regular`; every fault is a ConfigError."""
    with _opening(path), open_regular(path, limit=limit, within=within) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def load_mapping(path: Path, origin: str = "", limit: int = WHOLE_BYTES, /, **kinds: ValueType) -> dict[str, Any]:
    """Return the mapping in a JSON file, or by its ending a YAML file, which has values of some kinds.

    A ConfigError where it cannot be read, or holds something else; `origin` names the file.
    """
    content = read_regular(path, limit=limit)
    with parsing(origin or str(path), "is damaged", WHOLE_COPY):
        value: dict[str, Any] = (read_yaml if path.suffix == ".yaml" else read_json)(content)
        if not isinstance(value, dict) or kinds.keys() - _of_kinds(value, kinds):
            raise ValueError(f"it is no mapping{' with ' * bool(kinds)}{', '.join(kinds)}")
        return value


def stored_mapping(path: Path, *, key: str | None = None) -> dict[str, Any]:
    """Return the mapping in a file, empty where it is missing; a ConfigError of `key` if damaged."""
    return load_mapping(path, f"{key}={path}" if key else "", MAX_BYTES) if path.is_file() else {}


def read_mapping(path: Path, **kinds: ValueType) -> dict[str, Any]:
    """Return the mapping in a file, without values of other types; empty if it cannot be read."""
    try:
        return _of_kinds(load_mapping(path), kinds)
    except ConfigError:
        return {}


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, none if it is missing, too long ones in pieces; else a ConfigError."""
    if os.path.lexists(path):
        with _opening(path), open_regular(path, limit=LINES_BYTES) as file:
            yield from iter(partial(file.readline, LINE_BYTES), b"")


def bounded_lines(file: BinaryIO, origin: str) -> Iterator[bytes]:
    """Yield the lines of an open file; a ConfigError of `origin` where one is longer than `MAX_BYTES`."""
    while line := file.readline(MAX_BYTES + 1):
        if len(line) > MAX_BYTES:
            raise ConfigError(f"{origin} has a line of more than {MAX_BYTES} bytes; {COPY}")
        yield line


def read_rows(path: Path, part: bytes = b"", /, **kinds: ValueType) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of the lines with `part` that can be read, without values of other types than `kinds`."""
    with suppress(ConfigError):
        for line in (each for each in read_lines(path) if part in each):
            with suppress(ValueError):
                row = read_json(line)
                if isinstance(row, dict):
                    yield _of_kinds(row, kinds)


def _of_kinds(row: dict[str, Any], kinds: dict[str, ValueType]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if isinstance(value, kinds.get(key, object))}


def read_json(text: str | bytes) -> Any:
    """Parse a JSON text; a ValueError where it is damaged, too deep, or too large for memory."""
    try:
        value = json.loads(text)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"it cannot be read ({type(error).__name__})") from error
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        _refuse_deeper(depth)
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
    return value


def read_yaml(text: str | bytes) -> Any:
    """Parse a YAML text; a ValueError as of `read_json`, and where it has aliases or too long a number."""
    return _parsed(text, lambda kind: kind(text).get_single_data())


def check_yaml(text: str | bytes) -> None:
    """Check the structure of a YAML text for another reader; raise ValueError as `read_yaml` does."""
    _parsed(text, lambda kind: None)


def _parsed(text: str | bytes, finish: Callable[[Any], Any]) -> Any:
    with suppress(ValueError), _yaml_faults():  # libyaml is many times as fast, but refuses halves of characters
        _check_events(text, YAML_LOADER)
        return finish(YAML_LOADER)
    with _yaml_faults():
        _check_events(text, yaml.SafeLoader)
        return finish(yaml.SafeLoader)


def _check_events(text: str | bytes, kind: Any) -> None:
    resolver, depth, documents = yaml.resolver.Resolver(), 0, 0
    for event in yaml.parse(text, kind):
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        _refuse_deeper(depth)
        if documents > 1:
            raise ValueError("it holds another document")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{event.anchor[:20]}; write out what it stands for")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_DIGITS:
            tag = event.tag or resolver.resolve(yaml.ScalarNode, event.value, event.implicit)
            if tag == _INTEGER:
                raise ValueError(f"it holds a number of {len(event.value)} digits")


@contextmanager
def _yaml_faults() -> Iterator[None]:
    """Raise ValueError for the errors of PyYAML, which are of many kinds, such as for dates."""
    try:
        yield
    except ValueError:
        raise
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{error.problem or error.context}{line}") from error
    except Exception as error:
        raise ValueError(f"it cannot be read ({type(error).__name__})") from error


def _refuse_deeper(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def check_floating(name: str, tensor: Any, origin: str) -> None:
    """Refuse weights, not indices or counts, that are stored as integers or booleans."""
    if tensor.ndim and not tensor.is_floating_point() and not name.endswith(("position_ids", ".indices")):
        raise ConfigError(
            f"{origin}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, and weights are floating-point "
            "numbers; take the file in fp16, bf16 or fp32 that this one was made from: of quantized weights the scales "
            "are not read here"
        )
