"""Reading stored tensors one at a time, so that never two whole copies of a model are in memory.

Lives here: safetensors files and shards, and pickles read as weights only. Must not live here: what the names mean.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights_keys import Shape, Stored


class StoredTensors:
    """The tensors of some weight files by name, read lazily; a context manager.

    Args:
        files: safetensors files, or pickles (`.bin`, `.pt`) that hold tensors alone, possibly under `state_dict`.
        key: the config key that named them, for messages.

    Raises:
        ConfigError: a file that cannot be read as weights.
    """

    def __init__(self, files: Sequence[Path], *, key: str) -> None:
        self._files = files
        self._key = key
        self._stack = ExitStack()
        self._holders: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for file in self._files:
            if file.suffix == ".safetensors":
                holder = self._open(file)
                self._holders |= dict.fromkeys(holder.keys(), holder)
            else:
                self._holders |= load_pickle(file, self._key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holders.clear()
        self._stack.close()

    def _open(self, file: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{self._key}={file}: cannot be read as safetensors ({error}); copy or download it again"
            ) from error

    def shapes(self) -> dict[str, Shape]:
        """Return every stored name and shape, without reading the tensors."""
        return {name: self._shape(name) for name in self._holders}

    def _shape(self, name: str) -> Shape:
        holder = self._holders[name]
        return tuple(holder.shape) if isinstance(holder, Tensor) else tuple(holder.get_slice(name).get_shape())

    def shape(self, stored: Stored) -> Shape:
        """Return the shape of a tensor of the network."""
        rows, *rest = self._shape(stored.name) or (1,)
        return self._shape(stored.name) if stored.third is None else (rows // 3, *rest)

    def read(self, stored: Stored) -> Tensor:
        """Read one tensor of the network; its memory may be the file's."""
        holder = self._holders[stored.name]
        if stored.third is None:
            return holder if isinstance(holder, Tensor) else holder.get_tensor(stored.name)
        return self.read_rows(stored, 0, self.shape(stored)[0])

    def read_rows(self, stored: Stored, first: int, count: int) -> Tensor:
        """Read `count` rows of a tensor of the network, from row `first`, and nothing else of it."""
        holder = self._holders[stored.name]
        begin = first + (stored.third or 0) * self.shape(stored)[0]
        return (holder if isinstance(holder, Tensor) else holder.get_slice(stored.name))[begin : begin + count]


def load_pickle(file: Path, key: str) -> dict[str, Tensor]:
    """Read a pickle of tensors without running code from it.

    Raises:
        ConfigError: it holds anything but tensors by name.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_stored(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{key}={file}: cannot be read as weights alone ({type(error).__name__}); convert it to safetensors"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConfigError(f"{key}={file}: holds something else than tensors by name; convert it to safetensors")
    return content


def _is_stored(file: Path) -> bool:
    """Return whether a file is a zip of parts as they are, which can be mapped into memory: torch writes no other."""
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as content:
        return all(each.compress_type == zipfile.ZIP_STORED for each in content.infolist())
