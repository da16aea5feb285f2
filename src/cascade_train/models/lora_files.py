"""Adapters on disk: one safetensors file with metadata, and peft's adapter folder.

Lives here: both formats, in and out. Must not live here: what an adapter does (lora.py), when it is written
(export.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.lora import ADAPTER, LoraSpec, adapted_layers, attach_adapters, lora_spec
from cascade_train.models.weights_keys import SIZES, compare_keys, recognise_size
from cascade_train.models.weights_source import find_part

FORMAT = "cascade_train.lora/1"
SINGLE_FILE = "lora.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

_PEFT_PREFIX = "base_model.model."


def write_single_file(path: Path, state: Mapping[str, Tensor], spec: LoraSpec, metadata: Mapping[str, str]) -> None:
    """Write adapters as one file whose header says what they are and which base they belong to.

    Args:
        path: ends in `.safetensors`.
        state: `<module>.lora_A.weight` and `<module>.lora_B.weight`, see `lora.adapter_state`.
        spec: what the adapters are.
        metadata: further facts, kept as they are.
    """
    header = {
        **metadata,
        "format": FORMAT,
        "base_size": spec.base_size or "",
        "rank": str(spec.rank),
        "alpha": str(spec.alpha),
        "targets": json.dumps(spec.targets),
    }
    save_file({name: value.contiguous() for name, value in state.items()}, path, metadata=header)


def write_peft_folder(folder: Path, state: Mapping[str, Tensor], spec: LoraSpec) -> None:
    """Write adapters as `PeftModel.from_pretrained` reads them, into an existing folder."""
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.targets), inference_mode=True)
    config.save_pretrained(str(folder))
    tensors = {f"{_PEFT_PREFIX}{name}": value.contiguous() for name, value in state.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})


def read_lora(source: str, *, key: str) -> tuple[LoraSpec, dict[str, Tensor]]:
    """Read adapters from a single file, a peft folder, or a run of ours.

    Raises:
        ConfigError: nothing there, or not adapters that this library reads.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_peft_folder(find_part(path, "lora", key), key)
    if not path.is_file():
        raise ConfigError(
            f"{key}={source}: no such file or folder; give a run, its export/lora, or a .safetensors file"
        )
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{key}={source}: is no readable adapter file ({error}); copy it again") from error
    if header.get("format") != FORMAT:
        raise ConfigError(f"{key}={source}: its header does not say {FORMAT}; only adapters exported here are read")
    spec = LoraSpec(
        rank=int(header["rank"]),
        alpha=float(header["alpha"]),
        targets=tuple(json.loads(header["targets"])),
        base_size=header["base_size"] or None,
    )
    return spec, state


def _read_peft_folder(folder: Path, key: str) -> tuple[LoraSpec, dict[str, Tensor]]:
    if not (folder / ADAPTER_CONFIG).is_file() or not (folder / ADAPTER_FILE).is_file():
        raise ConfigError(f"{key}={folder}: is no adapter folder, it lacks {ADAPTER_CONFIG} or {ADAPTER_FILE}")
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        state = {name.removeprefix(_PEFT_PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    targets = tuple(sorted({name.rsplit(".lora_", 1)[0] for name in state}))
    return LoraSpec(rank=config["r"], alpha=float(config["lora_alpha"]), targets=targets, base_size=None), state


def load_lora(network: nn.Module, source: str, *, key: str = "from") -> LoraSpec:
    """Put stored adapters onto a network that has none, frozen except for them, and return what they are.

    Args:
        network: whole, with diffusers' keys; may lie on meta, then only the adapters have values.
        source: see `read_lora`.
        key: the config key that named the source.

    Raises:
        ConfigError: nothing there, or adapters of another model.
    """
    spec, state = read_lora(source, key=key)
    _check_fit(network, spec, f"{key}={source}")
    attach_adapters(network, rank=spec.rank, alpha=spec.alpha, dropout=0.0, targets=spec.targets)
    _fill(network, state, f"{key}={source}")
    return spec


def refill_lora(network: nn.Module, source: str, *, key: str = "from") -> None:
    """Give the adapters that `network` already carries their stored values.

    Args:
        network: whole, with adapters of the same modules, rank and alpha.
        source: see `read_lora`.
        key: the config key that named the source.

    Raises:
        ConfigError: nothing there, or other adapters.
    """
    spec, state = read_lora(source, key=key)
    carried = lora_spec(network)
    if (spec.rank, spec.alpha) != (carried.rank, carried.alpha):
        raise ConfigError(
            f"{key}={source}: its adapters have rank {spec.rank} and alpha {spec.alpha:g}, the task asks for "
            f"task.rank={carried.rank} task.alpha={carried.alpha:g}; set both as they were trained"
        )
    _fill(network, state, f"{key}={source}")


def _fill(network: nn.Module, state: Mapping[str, Tensor], origin: str) -> None:
    wanted = {
        f"{name}.lora_{half}.weight": getattr(layer, f"lora_{half}")[ADAPTER].weight
        for name, layer in adapted_layers(network)
        for half in ("A", "B")
    }
    difference = compare_keys(wanted, state)
    if difference is not None:
        raise ConfigError(f"{origin}: its tensors are not those of the adapted modules ({difference})")
    for name, parameter in wanted.items():
        if parameter.shape != state[name].shape:
            raise ConfigError(
                f"{origin}: {name} has shape {tuple(state[name].shape)}, this model needs "
                f"{tuple(parameter.shape)}; choose the model= the adapter was trained on"
            )
        parameter.data.copy_(state[name])


def _check_fit(network: nn.Module, spec: LoraSpec, origin: str) -> None:
    size = recognise_size({name: tuple(value.shape) for name, value in network.state_dict().items()})
    if spec.base_size is not None and size != spec.base_size:
        is_now = SIZES[size] if size is not None else "of another size"
        raise ConfigError(
            f"{origin}: the adapter belongs to {SIZES[spec.base_size]}, but the network is {is_now}; "
            f"use model={spec.base_size}"
        )
    modules = {name for name, _ in network.named_modules()}
    absent = [name for name in spec.targets if name not in modules]
    if absent:
        raise ConfigError(
            f"{origin}: adapts {absent[0]}, which this model has not; choose the model= the adapter was trained on"
        )
