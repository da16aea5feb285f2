"""The door for files that this process did not write: regular ones alone, and safe YAML and JSON.

A file's fault is a ConfigError, a text's alone a ValueError. The parsers of weights and data, and what a file means,
must not live here.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO

import yaml

from cascade_train.errors import ConfigError, RunError
from cascade_train.redaction import LONGEST_NAME, printable, shortened

WHOLE_BYTES = 32 * 2**20
"""Of a file that is read whole."""

MAX_BYTES = 16 * 2**20
"""Of a JSON file or a line of data."""

PICTURE_BYTES = 2**30

ValueType = type | UnionType

COPY = "copy or download it again"
WHOLE_COPY = "give another file, or put back a whole copy of it."

MAX_DEPTH = 50
"""Levels of nested lists and mappings in YAML, so that recursion over values is safe."""

YAML_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def open_regular(path: Path, *, limit: int = sys.maxsize) -> BufferedReader:
    """Open a regular file of at most `limit` bytes, without waiting for a pipe.

    Raises:
        OSError: it is not there, or the system refuses it.
        ValueError: it is a pipe, a device or a folder, or is larger.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    status = os.fstat(handle)
    is_regular = stat.S_ISREG(status.st_mode)
    if not is_regular or status.st_size > limit:
        os.close(handle)
        raise ValueError(f"it has more than {limit} bytes" if is_regular else "a pipe, a device or a folder")
    return os.fdopen(handle, "rb")


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


def read_regular(path: Path, *, limit: int = WHOLE_BYTES) -> bytes:
    """Content of a file, opened as by `open_regular`; every fault is a ConfigError."""
    with _opening(path), open_regular(path, limit=limit) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def load_mapping(path: Path, origin: str = "", limit: int = WHOLE_BYTES, /, **kinds: ValueType) -> dict[str, Any]:
    """Mapping in a JSON file, or by its ending a YAML file, which has values of some kinds.

    A ConfigError where it cannot be read, or holds something else; `origin` names the file.
    """
    content = read_regular(path, limit=limit)
    with parsing(origin or str(path), "is damaged", WHOLE_COPY):
        value: dict[str, Any] = (read_yaml if path.suffix == ".yaml" else read_json)(content)
        if not isinstance(value, dict) or kinds.keys() - _of_kinds(value, kinds):
            raise ValueError(f"it is no mapping{' with ' * bool(kinds)}{', '.join(kinds)}")
        return value


def stored_mapping(path: Path, *, key: str | None = None) -> dict[str, Any]:
    """Mapping in a file, empty where it is missing; a ConfigError of `key` if damaged."""
    return load_mapping(path, f"{key}={path}" if key else "", MAX_BYTES) if path.is_file() else {}


def read_mapping(path: Path, **kinds: ValueType) -> dict[str, Any]:
    """Mapping in a file, without values of other types; empty if it cannot be read."""
    try:
        return _of_kinds(load_mapping(path), kinds)
    except ConfigError:
        return {}


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, none if it is missing; a ConfigError if it cannot be read."""
    if os.path.lexists(path):
        with _opening(path), open_regular(path) as file:
            yield from file


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
    """Parse a JSON text; a ValueError where it is damaged or too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def read_yaml(text: str | bytes) -> Any:
    """Parse a YAML text; a ValueError where it is damaged, too deep, or has aliases, which can stand for gigabytes."""
    return _parsed(text, lambda loader: loader(text).get_single_data())


def check_yaml(text: str | bytes) -> None:
    """Check the structure of a YAML text for another reader; raise ValueError as `read_yaml` does."""
    _parsed(text, lambda loader: None)


def _parsed(text: str | bytes, finish: Callable[[Any], Any]) -> Any:
    with suppress(ValueError), _yaml_faults():  # libyaml is many times as fast, but refuses halves of characters
        _check_events(text, YAML_LOADER)
        return finish(YAML_LOADER)
    with _yaml_faults():
        _check_events(text, yaml.SafeLoader)
        return finish(yaml.SafeLoader)


def _check_events(text: str | bytes, loader: Any) -> None:
    depth = 0
    for event in yaml.parse(text, loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{event.anchor[:20]}; write out what it stands for")


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


def check_floating(name: str, tensor: Any, origin: str) -> None:
    """Refuse weights, not indices or counts, that are stored as integers or booleans."""
    if tensor.ndim and not tensor.is_floating_point() and not name.endswith(("position_ids", ".indices")):
        raise ConfigError(
            f"{origin}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, and weights are floating-point "
            "numbers; take the file in fp16, bf16 or fp32 that this one was made from: of quantized weights the scales "
            "are not read here"
        )
