"""Weights in: from files, in whatever of the known formats, into modules that lie on the meta device.

Must not live here: weights out (formats/export.py), adapters (lora.py), values of an untrained network (initialize.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights_keys import SIZES, Shape, Stored, compare_keys, map_keys, recognise_size
from cascade_train.models.formats.weights_source import find_weight_files
from cascade_train.models.formats.weights_tensors import StoredTensors
from cascade_train.models.initial_values import FirstValues, Shares


def load_network(
    network: nn.Module,
    source: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    key: str = "model.weights",
    part: str = "network",
) -> None:
    """Load a denoising network of Stage B or C in place, tensor by tensor.

    Args:
        network: a `StableCascadeUNet`, on the meta device or not; its tensors are replaced.
        source: see `weights_source.find_weight_files`; keys of diffusers or of the original.
        dtype: of the loaded floating-point tensors.
        device: of the loaded tensors.
        key: the config key that named the source.
        part: the folder of a pipeline or an export that holds such a network, see `weights_source`.

    Raises:
        ConfigError: no such weights, or weights of another model, saying which.
    """
    values = StoredValues(network, source, key=key, part=part)
    with values.open() as tensors:
        for name, where in values.stored.items():
            set_tensor(network, name, copy_to(tensors.read(where), dtype, device))


class StoredValues(FirstValues):
    """The values of a denoising network of Stage B or C that lie in files.

    Attributes:
        stored: where each tensor of the network lies.
    """

    def __init__(self, network: nn.Module, source: str, *, key: str = "model.weights", part: str = "network") -> None:
        """Find the files, and check that names and shapes in them are the network's.

        Args:
            network: as for `load_network`; stays as it is.
            source: see `weights_source.find_weight_files`; keys of diffusers or of the original.
            key: the config key that named the source.
            part: the folder of a pipeline or an export that holds such a network, see `weights_source`.

        Raises:
            ConfigError: no such weights, or weights of another model, saying which.
        """
        self._files = find_weight_files(source, key=key, part=part)
        self._key = key
        origin = f"{key}={source}"
        with self.open() as tensors:
            self.stored = map_keys(tensors.shapes())
            _refuse_adapters(self.stored, origin)
            check_size(network, {name: tensors.shape(where) for name, where in self.stored.items()}, origin)
            _check_shapes(network, tensors, self.stored, origin)

    def open(self) -> StoredTensors:
        """Return the files as a context manager."""
        return StoredTensors(self._files, key=self._key)

    def fill(self, shares: Shares) -> None:
        """Read the rows of each share, and no others."""
        with self.open() as tensors, torch.no_grad():
            for name, (rows, first) in shares.items():
                if rows.numel():
                    rows.copy_(tensors.read_rows(self.stored[name], first, len(rows)))


def read_network(network: nn.Module, source: str, *, key: str, part: str = "prior") -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole fp32 value, on the host, of every tensor of a network that is stored elsewhere.

    Args:
        network: as for `load_network`; stays as it is, and may be sharded.
        source: see `weights_source.find_weight_files`; keys of diffusers or of the original.
        key: the config key that named the source.
        part: the folder of a pipeline or an export that holds such a network, see `weights_source`.

    Raises:
        ConfigError: no such weights, or weights of another model, saying which.
    """
    values = StoredValues(network, source, key=key, part=part)
    with values.open() as tensors:
        for name, where in values.stored.items():
            yield name, copy_to(tensors.read(where), torch.float32, torch.device("cpu"))


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
    """Load any other module (compressor, previewer, Stage A) in place, whose own names are the stored ones.

    Args:
        module: on the meta device or not; its tensors are replaced.
        source: see `weights_source.find_weight_files`.
        dtype: of the loaded floating-point tensors.
        device: of the loaded tensors.
        key: the config key that named the source.
        part: the folder of a pipeline that holds such a module; None = the source itself.
        renamed: beginnings of stored names, by what the module calls them.

    Raises:
        ConfigError: no such weights, or weights of another module.
    """
    with StoredTensors(find_weight_files(source, key=key, part=part), key=key) as tensors:
        stored = {_begin_with(name, renamed): Stored(name) for name in tensors.shapes()}
        _assign(module, tensors, stored, f"{key}={source}", dtype, device)


def _begin_with(name: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _refuse_adapters(names: Iterable[str], origin: str) -> None:
    if any(".lora_" in name for name in names):
        raise ConfigError(
            f"{origin}: holds adapters, not a network's weights; train on them with task=lora task.weights=…, or merge "
            "them into weights: cascade-train merge"
        )


def check_size(network: nn.Module, shapes: Mapping[str, Shape], origin: str) -> None:
    """Refuse weights of another published size than the network's.

    Raises:
        ConfigError: names the size of both, and the `model=` that fits the weights.
    """
    stored = recognise_size(shapes)
    wanted = recognise_size({name: tuple(value.shape) for name, value in network.state_dict().items()})
    if stored != wanted and stored is not None:
        is_now = SIZES[wanted] if wanted is not None else "of another size"
        raise ConfigError(
            f"{origin}: these are weights of {SIZES[stored]}, but the network is {is_now}; use model={stored}"
        )


def _assign(
    module: nn.Module,
    tensors: StoredTensors,
    stored: Mapping[str, Stored],
    origin: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    _check_shapes(module, tensors, stored, origin)
    for name, where in stored.items():
        set_tensor(module, name, copy_to(tensors.read(where), dtype, device))


def _check_shapes(module: nn.Module, tensors: StoredTensors, stored: Mapping[str, Stored], origin: str) -> None:
    """Refuse tensors whose names or shapes are not the module's."""
    wanted = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    difference = compare_keys(wanted, stored)
    if difference is not None:
        raise ConfigError(f"{origin}: not the weights of this model ({difference}); choose the model= they belong to")
    for name, shape in wanted.items():
        if tensors.shape(stored[name]) != shape:
            raise ConfigError(
                f"{origin}: {name} has shape {tensors.shape(stored[name])}, this model needs {shape}; "
                "choose the model= they belong to"
            )


def copy_to(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a copy with memory of its own (never a file's); whole numbers keep their dtype."""
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device=device, dtype=wanted, copy=True, memory_format=torch.contiguous_format)


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put `tensor` in the place of a parameter or buffer; a parameter stays one, and keeps `requires_grad`."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=owner._parameters[leaf].requires_grad)
    else:
        owner._buffers[leaf] = tensor
