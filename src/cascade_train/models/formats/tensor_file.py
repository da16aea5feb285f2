"""Whole safetensors files with a header: equal content gives equal bytes, and a damaged header is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.redaction import LONGEST_NAME, shortened


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and the facts of the header, these in the order of their names (safetensors shuffles them)."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=dict(metadata))
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size)) | {"__metadata__": dict(sorted(metadata.items()))}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size)
        if len(text) != size:
            raise AssertionError(f"the header of {path} has {size} bytes, not {len(text)}")
        file.seek(8)
        file.write(text)


def read_tensors(path: Path, key: str, *, what: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the header and copies of the tensors; `key` names the config key and `what` the content, for messages.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
            return file.metadata() or {}, tensors
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{key}={path}: is no readable {what} ({error}); copy it again") from error


@contextmanager
def header_checked(origin: str) -> Iterator[None]:
    """Parse a header within; `origin` is the key and value that named the file.

    Raises:
        ConfigError: it lacks something, or has it in another form.
    """
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{origin}: its header is damaged ({type(error).__name__}: {shortened(str(error), LONGEST_NAME)}); copy it "
            "again from where it was made"
        ) from error
