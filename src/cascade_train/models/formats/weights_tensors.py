"""Stored tensors: reading them one at a time or with a header, and what their names and shapes mean.

Must not live here: where files lie (weights_source.py), and modules (weights.py).
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import check_floating, parsing

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """Where a tensor of a module is stored: under which name and, for fused projections, in which third of the rows."""

    name: str
    third: int | None = None


Layout = Callable[[Iterable[str]], Mapping[str, Stored]]
"""Maps stored names to where each tensor of the module is stored."""


def own_names(stored_names: Iterable[str]) -> dict[str, Stored]:
    """Lay out tensors that are stored under the module's own names."""
    return {name: Stored(name) for name in stored_names}


class StoredTensors:
    """The tensors of some weight files by the module's names, read lazily; a context manager that may be reentered.

    Never are two whole copies of a model in memory. Files are safetensors, or pickles (`.bin`, `.pt`) that hold tensors
    alone, possibly under `state_dict`; others are a ConfigError that names `key`.
    """

    def __init__(self, files: Sequence[Path], *, key: str, layout: Layout = own_names) -> None:
        self._files = files
        self._key = key
        self._layout = layout
        self._stack = ExitStack()
        self._holders: dict[str, Any] = {}
        self._stored: Mapping[str, Stored] = {}

    def __enter__(self) -> Self:
        files: dict[str, Path] = {}
        for file in self._files:
            if file.suffix == ".safetensors":
                holder = self._open(file)
                found = dict.fromkeys(holder.keys(), holder)
            else:
                found = load_pickle(file, self._key)
            self._holders |= found
            files |= dict.fromkeys(found, file)
        self._stored = self._layout(self._holders)
        for name, stored in self._stored.items():
            if self._shape(stored):  # not a count
                check_floating(stored.name, self.read_rows(name, 0, 0), f"{self._key}={files[stored.name]}")
        return self

    def __exit__(self, *_: object) -> None:
        self._holders.clear()
        self._stack.close()

    def _open(self, file: Path) -> Any:
        with parsing(f"{self._key}={file}:", "cannot be read as safetensors"):
            return self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))

    def shapes(self) -> dict[str, Shape]:
        """Return every name and shape, without reading the tensors."""
        return {name: self._shape(stored) for name, stored in self._stored.items()}

    def _shape(self, stored: Stored) -> Shape:
        holder = self._holders[stored.name]
        shape = tuple(holder.shape if isinstance(holder, Tensor) else holder.get_slice(stored.name).get_shape())
        rows, *rest = shape or (1,)
        return shape if stored.third is None else (rows // 3, *rest)

    def read(self, name: str) -> Tensor:
        """Read one tensor; its memory may be the file's."""
        stored = self._stored[name]
        holder = self._holders[stored.name]
        if stored.third is None:
            return holder if isinstance(holder, Tensor) else holder.get_tensor(stored.name)
        return self.read_rows(name, 0, self._shape(stored)[0])

    def read_rows(self, name: str, first: int, count: int) -> Tensor:
        """Read `count` rows of a tensor, from row `first`, and nothing else of it."""
        stored = self._stored[name]
        holder = self._holders[stored.name]
        begin = first if stored.third is None else first + stored.third * self._shape(stored)[0]
        return (holder if isinstance(holder, Tensor) else holder.get_slice(stored.name))[begin : begin + count]


def load_pickle(file: Path, key: str) -> dict[str, Tensor]:
    """Read a pickle of tensors by name without running code from it; a ConfigError if it holds anything else."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_uncompressed(file))
    except Exception as error:  # a damaged file raises errors of many kinds
        raise ConfigError(
            f"{key}={file}: cannot be read as weights alone. It has to be safetensors, or a pickle of tensors alone, "
            f"and is {kind_of(file)}; download it again, or convert it to safetensors"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    items = content.items() if isinstance(content, dict) else [("", None)]
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in items):
        raise ConfigError(f"{key}={file}: holds something else than tensors by name; convert it to safetensors")
    return content


KINDS = (
    (re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE), "a web page"),
    (re.compile(rb"version https://git-lfs"), "a pointer of Git LFS to the file itself"),
    (re.compile(rb"\x89PNG|\xff\xd8\xff|RIFF....WEBP", re.DOTALL), "a picture"),
    (re.compile(rb"\x1f\x8b|7z\xbc\xaf|.{257}ustar", re.DOTALL), "an archive"),
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle of something else, or one that is cut off"),
    (re.compile(rb"[\t\n\r\x20-\x7e]+\Z"), "text"),
)
"""How files begin that are taken for weights, and what they are."""


def kind_of(file: Path) -> str:
    """Return in words what a file is, by its size and its first bytes."""
    size = file.stat().st_size
    with suppress(Exception), zipfile.ZipFile(file) as content:  # damage raises errors of many kinds
        names = content.namelist()
        if any("/code/" in name for name in names):
            return "a program of TorchScript"
        is_torch = any(name.endswith("data.pkl") for name in names)
        return "a pickle of something else" if is_torch else "a zip archive"
    with file.open("rb") as opened:
        begin = opened.read(512)
    known = (kind for pattern, kind in KINDS if pattern.match(begin))
    return f"{next(known, 'damaged, or of another kind')} ({size} bytes)" if begin else "empty"


def _is_uncompressed(file: Path) -> bool:
    """Return whether a file is a zip without compression, as torch writes it, which can be mapped into memory."""
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as content:
        return all(each.compress_type == zipfile.ZIP_STORED for each in content.infolist())


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
    """Return header and copies of the tensors; `key` and `what`, the content, are for the ConfigError."""
    with parsing(f"{key}={path}:", f"is no readable {what}"), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
        header = file.metadata() or {}
    for name, tensor in tensors.items():
        check_floating(name, tensor, f"{key}={path}")
    return header, tensors


def compare_keys(wanted: Iterable[str], found: Iterable[str], *, limit: int = 3) -> str | None:
    """Return what is missing and unexpected, the first few of each in order; None = the sets are equal."""
    wanted, found = list(wanted), list(found)
    have, want = set(found), set(wanted)
    missing = [name for name in wanted if name not in have]
    unexpected = [name for name in found if name not in want]
    parts = []
    for title, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            parts.append(f"{len(names)} {title}: {', '.join(names[:limit])}{more}")
    return "; ".join(parts) or None


def check_fit(wanted: Mapping[str, Shape], found: Mapping[str, Shape], origin: str, *, what: str, remedy: str) -> None:
    """Refuse tensors whose names or shapes are not those wanted.

    `origin` is the key and value that named them, `what` says what is wrong where names differ, `remedy` ends the
    sentence.
    """
    difference = compare_keys(wanted, found)
    if difference is not None:
        raise ConfigError(f"{origin}: {what} ({difference}); {remedy}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConfigError(f"{origin}: {name} has shape {found[name]}, this model needs {shape}; {remedy}")


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return the shapes of tensors by name."""
    return {name: tuple(value.shape) for name, value in tensors.items()}
