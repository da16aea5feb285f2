"""Weights in: from files in any known format into modules that lie on the meta device.

Must not live here: weights out (export.py), adapters (lora_files.py), values of an untrained network (initialize.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.family import Family
from cascade_train.models.formats.weights_source import find_weight_files
from cascade_train.models.formats.weights_tensors import (
    Layout,
    Shape,
    Stored,
    StoredTensors,
    check_fit,
    own_names,
    shapes_of,
)
from cascade_train.models.initialize import InitialValues, Shares, materialise


def open_weights(
    source: str,
    *,
    key: str = "model.weights",
    part: str | tuple[str, ...] | None = None,
    layout: Layout = own_names,
) -> StoredTensors:
    """Find weights (see `find_weight_files`) and return their tensors as a context manager.

    `layout` says how stored names become the module's, see `Family.layout`.
    """
    return StoredTensors(find_weight_files(source, key=key, part=part), key=key, layout=layout)


def load_network(
    network: nn.Module,
    source: str,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    key: str = "model.weights",
    part: str | None = None,
) -> None:
    """Load a denoising network in place, tensor by tensor; diffusers' keys or the original's.

    It may lie on the meta device. `dtype` None = that of the first stored tensor; `part` None = whichever of the
    family's is there. A ConfigError names the model that other weights belong to.
    """
    with _open_network(network, source, key=key, part=part) as tensors:
        _check_network(network, tensors, f"{key}={source}")
        _put(network, tensors, dtype or tensors.read(next(iter(tensors.shapes()))).dtype, device)


def load_state(
    network: nn.Module, source: str, *, dtype: torch.dtype | None, key: str, part: str | None = None
) -> dict[str, Tensor]:
    """Load a network on the host, as `load_network`, and return its state dict."""
    load_network(network, source, dtype=dtype, device=torch.device("cpu"), key=key, part=part)
    return network.state_dict()


def read_network(network: nn.Module, source: str, *, key: str, part: str = "prior") -> Iterator[tuple[str, Tensor]]:
    """Yield name and whole fp32 value, on the host, of the stored tensors of a network, which may be sharded."""
    with _open_network(network, source, key=key, part=part) as tensors:
        _check_network(network, tensors, f"{key}={source}")
        for name in tensors.shapes():
            yield name, copy_to(tensors.read(name), torch.float32, torch.device("cpu"))


def stored_size(family: Family, source: str, *, key: str, part: str | None = None) -> str | None:
    """Return the option of `model=` that a stored network of a family has the size of, see `Family.size_of`."""
    with open_weights(source, key=key, part=part or family.parts, layout=family.layout({})) as tensors:
        return family.size_of(tensors.shapes())


def _open_network(network: nn.Module, source: str, *, key: str, part: str | None) -> StoredTensors:
    family = network.family
    return open_weights(source, key=key, part=part or family.parts, layout=family.layout(dict(network.config)))


class StoredValues(InitialValues):
    """The values of a denoising network that lie in files; arguments as for `load_network`.

    Raises:
        ConfigError: no such weights, or weights of another model, naming it.
    """

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
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Load any other module (compressor, previewer, Stage A) in place, by its own names.

    It may lie on the meta device. `renamed` are prefixes of stored names -> the module's.
    """

    def layout(names: Iterable[str]) -> dict[str, Stored]:
        return {replace_prefix(name, renamed): Stored(name) for name in names}

    with open_weights(source, key=key, part=part, layout=layout) as tensors:
        _check_shapes(module, tensors.shapes(), f"{key}={source}")
        _put(module, tensors, dtype, device)


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
    for name, value in values.items():
        set_tensor(module, name, copy_to(value, dtype, device))


def replace_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with the first of the prefixes that it has replaced by its value."""
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _put(module: nn.Module, tensors: StoredTensors, dtype: torch.dtype, device: torch.device) -> None:
    for name in tensors.shapes():
        set_tensor(module, name, copy_to(tensors.read(name), dtype, device))


def _check_network(network: nn.Module, tensors: StoredTensors, origin: str) -> None:
    shapes = tensors.shapes()
    if not shapes:
        raise ConfigError(f"{origin}: holds no tensors")
    if any(".lora_" in name for name in shapes):
        raise ConfigError(
            f"{origin}: holds adapters, not a network's weights; train on them with task=lora task.weights=…, or merge "
            "them into weights: cascade-train merge"
        )
    family = network.family
    stored, wanted = family.size_of(shapes), family.size_of(shapes_of(network.state_dict()))
    if stored is not None and stored != wanted:
        is_now = family.sizes[wanted] if wanted is not None else "of another size"
        raise ConfigError(
            f"{origin}: these are weights of {family.sizes[stored]}, but the network is {is_now}; use model={stored}"
        )
    _check_shapes(network, shapes, origin)


def _check_shapes(module: nn.Module, shapes: Mapping[str, Shape], origin: str) -> None:
    remedy = "choose the model= they belong to"
    check_fit(shapes_of(module.state_dict()), shapes, origin, what="not the weights of this model", remedy=remedy)


def copy_to(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a copy with memory of its own (never a file's); whole numbers keep their dtype."""
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device=device, dtype=wanted, copy=True, memory_format=torch.contiguous_format)


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put `tensor` in place of a parameter or buffer; a parameter stays one, and keeps `requires_grad`."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=owner._parameters[leaf].requires_grad)
    else:
        owner._buffers[leaf] = tensor
