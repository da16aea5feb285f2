"""Files of data and weights from outside, opened for the parsers that read them; each fault is one ConfigError.

Must not live here: the parsers, and what a file means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from cascade_train.errors import ConfigError, RunError
from cascade_train.files.untrusted import open_regular, read_json
from cascade_train.redaction import LONGEST_NAME, printable, shortened

MAX_BYTES = 16 * 2**20
"""Of a JSON file or a line: more than ten times the longest that programs write, and below 1 GB as values."""

COPY = "copy or download it again"


@contextmanager
def parsing(
    origin: str, fault: str = "cannot be read", remedy: str = COPY, *, passing: type[Exception] = RunError
) -> Iterator[None]:
    """Run a parser of a file within: damage, which raises errors of many kinds, is a ConfigError.

    Its text is `origin`, the file, with `fault`, what the parser says, and `remedy`. Errors of ours and `passing` pass.
    """
    try:
        yield
    except (ConfigError, RunError, passing):
        raise
    except Exception as error:
        text = str(error) if " " in str(error) else f"{type(error).__name__} {error}".strip()
        reason = printable(shortened(text, LONGEST_NAME))
        raise ConfigError(f"{origin} {fault} ({reason}); {remedy}") from error


def stored_mapping(path: Path, *, key: str | None = None) -> dict[str, Any]:
    """Return what a JSON file says, nothing where it is not there; a ConfigError, of `key`, where it is no mapping."""
    if not path.is_file():
        return {}
    origin = f"{path}:" if key is None else f"{key}={path}:"
    with parsing(origin, "is no mapping in JSON that can be read"), open_regular(path, limit=MAX_BYTES) as file:
        found: dict[str, Any] = read_json(file.read())
        if not isinstance(found, dict):
            raise TypeError(f"it is a {type(found).__name__}")
        return found


def bounded_lines(file: BinaryIO, origin: str) -> Iterator[bytes]:
    """Yield the lines of an open file; a ConfigError of `origin` where one is longer than `MAX_BYTES`."""
    while line := file.readline(MAX_BYTES + 1):
        if len(line) > MAX_BYTES:
            raise ConfigError(f"{origin} has a line of more than {MAX_BYTES} bytes; {COPY}")
        yield line


def check_floating(name: str, tensor: Any, origin: str) -> None:
    """Refuse weights, not indices or counts, that are stored as integers or booleans."""
    if tensor.ndim and not tensor.is_floating_point() and not name.endswith(("position_ids", ".indices")):
        raise ConfigError(
            f"{origin}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, and weights are floating-point "
            "numbers; take the file in fp16, bf16 or fp32 that this one was made from: of quantized weights the scales "
            "are not read here"
        )
