"""Weights in: stored tensors of any known format, read one at a time into modules that lie on the meta device.

Must not live here: where files lie (weights_source.py), weights out (export.py), adapters (lora_files.py), values of an
untrained network (initialize.py).
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import check_floating, parsing
from cascade_train.models.adapters.kinds import is_adapter
from cascade_train.models.family import Family, NameLayout, Shape, Stored, own_names
from cascade_train.models.formats.weights_source import find_weight_files
from cascade_train.models.initialize import Shares, materialise


class StoredTensors:
    """The tensors of some weight files by the module's names, read lazily; a context manager that may be reentered.

    Never are two whole copies of a model in memory. Files are safetensors, or pickles (`.bin`, `.pt`) that hold tensors
    alone, possibly under `state_dict`; others are a ConfigError that names `key`.
    """

    def __init__(self, files: Sequence[Path], *, key: str, layout: NameLayout = own_names) -> None:
        self._files, self._key, self._layout = files, key, layout
        self._stack = ExitStack()
        self._holders: dict[str, Any] = {}
        self._stored: Mapping[str, Stored] = {}

    def __enter__(self) -> Self:
        files: dict[str, Path] = {}
        for file in self._files:
            if file.suffix == ".safetensors":
                with parsing(f"{self._key}={file}:", "cannot be read as safetensors"):
                    holder = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
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

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every name and tensor, read when it is asked for; see `read`."""
        return ((name, self.read(name)) for name in self._stored)

    def read_rows(self, name: str, first: int, count: int) -> Tensor:
        """Read `count` rows of a tensor, from row `first`, and nothing else of it."""
        stored = self._stored[name]
        holder = self._holders[stored.name]
        begin = first if stored.third is None else first + stored.third * self._shape(stored)[0]
        return (holder if isinstance(holder, Tensor) else holder.get_slice(stored.name))[begin : begin + count]


def open_weights(
    source: str,
    *,
    key: str = "model.weights",
    part: str | tuple[str, ...] | None = None,
    layout: NameLayout = own_names,
) -> StoredTensors:
    """Find weights (see `find_weight_files`) and return their tensors as a context manager.

    `layout` says how stored names become the module's, see `Family.layout`.
    """
    return StoredTensors(find_weight_files(source, key=key, part=part), key=key, layout=layout)


def read_belonging(source: str, key: str, part: str | None, belongs: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the stored tensors that belong to a part, or all where none is named as in a file of several parts."""
    with open_weights(source, key=key, part=part) as tensors:
        names = list(tensors.shapes())
        return {name: tensors.read(name).clone() for name in [n for n in names if belongs(n)] or names}


def load_pickle(file: Path, key: str) -> dict[str, Tensor]:
    """Read a pickle of tensors by name without running code from it; a ConfigError if it holds anything else."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_uncompressed(file))
    except Exception as error:  # a damaged file raises errors of many kinds
        raise ConfigError(
            f"{key}={file}: cannot be read as weights alone. It has to be safetensors, or a pickle of tensors alone, "
            "and no web page or pointer of Git LFS; download it again, or convert it to safetensors"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    items = content.items() if isinstance(content, dict) else [("", None)]
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in items):
        raise ConfigError(f"{key}={file}: holds something else than tensors by name; convert it to safetensors")
    return content


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


def load_state(
    network: nn.Module,
    source: str,
    *,
    dtype: torch.dtype | None,
    key: str = "model.weights",
    part: str | None = None,
    change: Callable[[str, Tensor], Tensor] = lambda _, value: value,
) -> dict[str, Tensor]:
    """Load a denoising network on the host in place, by diffusers' keys or the original's; return its state dict.

    It may lie on the meta device. `dtype` None = that of the first stored tensor; `part` None = whichever of the
    family's exists; `change` of name and stored tensor comes before the dtype. A ConfigError names the model that
    other weights belong to.
    """
    with _open_network(network, source, key=key, part=part) as tensors:
        _check_network(network, tensors, f"{key}={source}")
        dtype = dtype or next(tensors.items())[1].dtype
        _put(network, ((name, change(name, value)) for name, value in tensors.items()), dtype, torch.device("cpu"))
    return network.state_dict()


def read_network(network: nn.Module, source: str, *, key: str, part: str = "prior") -> Iterator[tuple[str, Tensor]]:
    """Yield name and whole fp32 value, on the host, of the stored tensors of a network, which may be sharded."""
    with _open_network(network, source, key=key, part=part) as tensors:
        _check_network(network, tensors, f"{key}={source}")
        for name, value in tensors.items():
            yield name, copy_to(value, torch.float32, torch.device("cpu"))


def stored_size(family: Family, source: str, *, key: str, part: str | None = None) -> str | None:
    """Return the option of `model=` that a stored network of a family has the size of, see `Family.size_of`."""
    with open_weights(source, key=key, part=part or family.parts, layout=family.layout({})) as tensors:
        return family.size_of(tensors.shapes())


def _open_network(network: nn.Module, source: str, *, key: str, part: str | None) -> StoredTensors:
    family = network.family
    return open_weights(source, key=key, part=part or family.parts, layout=family.layout(dict(network.config)))


class StoredValues:
    """As `DrawnValues`, of a denoising network that lies in files; arguments and errors as of `load_state`."""

    def __init__(self, network: nn.Module, source: str, *, key: str = "model.weights", part: str | None = None) -> None:
        self._tensors = _open_network(network, source, key=key, part=part)
        with self._tensors as tensors:
            _check_network(network, tensors, f"{key}={source}")

    def fill(self, shares: Shares) -> None:
        """Read the rows of each share, and no others."""
        with self._tensors as tensors, torch.no_grad():
            for name, (rows, first) in shares.items():
                if rows.numel():
                    rows.copy_(tensors.read_rows(name, first, len(rows)))


def load_module(
    module: nn.Module,
    source: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    key: str,
    part: str | None = None,
    layout: NameLayout = own_names,
) -> None:
    """Load any other module (compressor, previewer, Stage A) in place; it may lie on the meta device."""
    with open_weights(source, key=key, part=part, layout=layout) as tensors:
        _check_shapes(module, tensors.shapes(), f"{key}={source}")
        _put(module, tensors.items(), dtype, device)


def check_dtypes(source: str, *, key: str) -> None:
    """Refuse weights that another library has loaded, where they are stored as integers or booleans."""
    with open_weights(source, key=key):
        return


def put_tensors(
    module: nn.Module, values: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device, origin: str
) -> None:
    """Give a module on the meta device whole tensors under its own names; `origin` is for the ConfigError."""
    _check_shapes(module, shapes_of(values), origin)
    materialise(module, device, dtype)
    module.load_state_dict(values)


def _put(module: nn.Module, values: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device) -> None:
    """Put copies in place of a module's tensors, whose start values need not be known."""
    module.load_state_dict({name: copy_to(value, dtype, device) for name, value in values}, assign=True)


def replace_parts(name: str, parts: Iterable[tuple[str, str]]) -> str:
    """Return a name with each of these parts of it replaced, one after the other."""
    for old, new in parts:
        name = name.replace(old, new)
    return name


def _check_network(network: nn.Module, tensors: StoredTensors, origin: str) -> None:
    shapes = tensors.shapes()
    if not shapes:
        raise ConfigError(f"{origin}: holds no tensors")
    if any(map(is_adapter, shapes)):
        raise ConfigError(
            f"{origin}: holds adapters, not a network's weights; train on them with task=lora task.weights=…, or merge "
            "them into weights: cascade-train merge"
        )
    family = network.family
    sizes = family.size_of(shapes), family.size_of(shapes_of(network.state_dict()))
    family.check_size(*sizes, f"{origin}: these are weights of")
    _check_shapes(network, shapes, origin)


def _check_shapes(module: nn.Module, shapes: Mapping[str, Shape], origin: str) -> None:
    remedy = "choose the model= they belong to"
    check_fit(shapes_of(module.state_dict()), shapes, origin, what="not the weights of this model", remedy=remedy)


def check_fit(wanted: Mapping[str, Shape], found: Mapping[str, Shape], origin: str, *, what: str, remedy: str) -> None:
    """Refuse tensors whose names or shapes are not those wanted.

    `origin` is the key and value that named them, `what` the fault where names differ, `remedy` ends the sentence.
    """
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    if missing or unexpected:
        lists = ((names, title) for names, title in ((missing, "missing"), (unexpected, "unexpected")) if names)
        raise ConfigError(f"{origin}: {what} ({'; '.join(_first(*each) for each in lists)}); {remedy}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConfigError(f"{origin}: {name} has shape {found[name]}, this model needs {shape}; {remedy}")


def _first(names: Sequence[str], title: str, limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} {title}: {', '.join(names[:limit])}{more}"


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return the shapes of tensors by name."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def copy_to(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a copy with memory of its own (never a file's); whole numbers keep their dtype."""
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device=device, dtype=wanted, copy=True, memory_format=torch.contiguous_format)
