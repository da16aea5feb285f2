"""Weights and adapters out in the formats of other programs, each read back and compared before it takes its place.

Lives here: one function per kind that writes any of its formats. Must not live here: what a run leaves by itself
(formats/export.py), the formats' names (formats/weights_keys.py, lora_files*.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.formats.export import (
    Exported,
    build_plain_network,
    check_equal_tensors,
    checked_error,
    fixed_prediction,
    lora_error,
    network_config,
    replaced_directory,
    replaced_file,
    save_lora,
)
from cascade_train.models.formats.lora_files import module_shapes, read_lora, write_single_file
from cascade_train.models.formats.lora_files_content import StoredLora
from cascade_train.models.formats.lora_files_keyed import write_keyed, write_token_files
from cascade_train.models.formats.lora_files_original import write_original
from cascade_train.models.formats.weights import load_network
from cascade_train.models.formats.weights_keys import map_keys, original_layout, recognise_size
from cascade_train.models.formats.weights_source import find_weight_files
from cascade_train.models.formats.weights_tensors import StoredTensors

log = logging.getLogger(__name__)

NETWORK_FORMATS = ("diffusers", "original")
LORA_FORMATS = ("peft", "single", "comfyui", "kohya", "original")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_state(
    network: nn.Module, source: str, *, dtype: torch.dtype | None, key: str, part: str = "network"
) -> dict[str, Tensor]:
    """Read the weights of a network, on the host.

    Args:
        network: on the meta device; gets the weights.
        source: see `weights_source.find_weight_files`.
        dtype: of the result; None = as stored.
        key: the argument that named the source.
        part: the folder of a pipeline that is meant, see `weights_source`.

    Raises:
        ConfigError: no such weights, or weights of another model.
    """
    with StoredTensors(find_weight_files(source, key=key, part=part), key=key) as tensors:
        stored = next(iter(map_keys(tensors.shapes()).values()), None)
        if stored is None:
            raise ConfigError(f"{key}={source}: holds no tensors")
        dtype = tensors.read(stored).dtype if dtype is None else dtype
    load_network(network, source, dtype=dtype, device=torch.device("cpu"), key=key, part=part)
    return network.state_dict()


def stored_size(source: str, *, key: str, part: str = "network") -> str | None:
    """Return the `model=` name of stored weights' size, told from the tensors; None = no published size.

    Args:
        source: see `weights_source.find_weight_files`.
        key: the argument that named the source.
        part: the folder of a pipeline that is meant, see `weights_source`.

    Raises:
        ConfigError: no such weights.
    """
    with StoredTensors(find_weight_files(source, key=key, part=part), key=key) as tensors:
        return recognise_size({name: tensors.shape(where) for name, where in map_keys(tensors.shapes()).items()})


def save_network(state: Mapping[str, Tensor], config: Mapping[str, Any], out: Path, *, format: str) -> Exported:
    """Write a network's weights alone, replacing `out`.

    Args:
        state: the whole state dict with diffusers' keys, on the host, in the dtype to be written.
        config: the network's diffusers config.
        out: a folder for "diffusers", a file that ends in `.safetensors` for "original".
        format: one of `NETWORK_FORMATS`.

    Raises:
        RunError: what was read back differs; `out` is as it was.
    """
    network = build_plain_network(config, state)
    if format == "diffusers":
        with replaced_directory(out) as partial:
            network.save_pretrained(partial)
            return Exported(path=out, max_error=_read_back_error(network, partial, out))
    with replaced_file(out) as partial:
        save_file(original_state(state), partial, metadata={"format": "pt"})
        return Exported(path=out, max_error=_read_back_error(network, partial, out))


def original_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a network's tensors under the original's names, q, k and v in one; the others share memory."""
    return {
        name: (torch.cat([state[part] for part in parts]) if len(parts) > 1 else state[parts[0]]).contiguous()
        for name, parts in original_layout(state).items()
    }


def _read_back_error(network: nn.Module, written: Path, out: Path) -> float:
    """Compare tensors and a fixed prediction with those of the file, whose memory is mapped, not copied."""
    with StoredTensors(find_weight_files(str(written), key="export"), key="export") as tensors:
        found = {name: tensors.read(where) for name, where in map_keys(tensors.shapes()).items()}
        check_equal_tensors(network.state_dict(), found, out)
        loaded = build_plain_network(network_config(network), found)
        return checked_error(fixed_prediction(network), fixed_prediction(loaded), network.dtype, out)


def export_lora(
    lora: StoredLora,
    network: nn.Module,
    out: Path,
    *,
    format: str,
    metadata: Mapping[str, str],
) -> Exported:
    """Write adapters in one format, replacing `out`.

    Args:
        lora: the adapters.
        network: the network they belong to; may lie on meta.
        out: a folder for "peft", else a file that ends in `.safetensors`. Trained tokens go along as embeddings in
            `<stem>.embeddings` where the format has no place for them.
        format: one of `LORA_FORMATS`.
        metadata: further facts for the header.

    Raises:
        ConfigError: something that the format has no place for.
        RunError: what was read back differs; `out` is as it was.
    """
    if format == "peft":
        config, more = network_config(network), {"text_encoder": lora.text_encoder, "tokens": lora.tokens}
        return save_lora(lora.state, lora.spec, config, out, metadata, **more)
    modules, keyed = module_shapes(network), format in ("comfyui", "kohya")
    with replaced_file(out) as partial:
        if keyed:
            write_keyed(partial, lora, metadata, style=format)
        elif format == "original":
            write_original(partial, lora, modules, metadata)
        else:
            write_single_file(partial, lora, metadata)
        expected = StoredLora(spec=lora.spec, state=lora.state, text_encoder=lora.text_encoder) if keyed else lora
        error = lora_error(expected, read_lora(str(partial), key="export", modules=modules), out)
    if keyed and lora.tokens is not None:
        write_token_files(out.with_name(f"{out.stem}.embeddings"), lora)
    return Exported(path=out, max_error=error)


@torch.no_grad()
def merge_lora_into(state: dict[str, Tensor], lora: StoredLora, strength: float) -> None:
    """Add adapters to the weights of a network's state dict, in place; sums in fp32, rounded once.

    W becomes W + strength (W' - W), W' being the adapted weight: with DoRA its outputs have the trained magnitudes.

    Args:
        state: the whole state dict with diffusers' keys.
        lora: the adapters.
        strength: 1 = as trained, 0 = none.
    """
    scale = lora.spec.alpha / lora.spec.rank
    for name in lora.spec.targets:
        down, up = (lora.state[f"{name}.lora_{half}.weight"].float() for half in ("A", "B"))
        weight = state[f"{name}.weight"].float()
        delta = scale * (up.flatten(1) @ down.flatten(1)).view(weight.shape)
        magnitude = lora.state.get(f"{name}.lora_magnitude_vector.weight")
        if magnitude is not None:
            adapted = weight + delta
            factor = magnitude.float().flatten() / adapted.flatten(1).norm(dim=1)
            delta = adapted * factor.view(-1, *[1] * (weight.ndim - 1)) - weight
        state[f"{name}.weight"].copy_(weight + strength * delta)


def merge_all(
    network: nn.Module, state: dict[str, Tensor], sources: Sequence[str], strengths: Sequence[float], **reading: Any
) -> None:
    """Read adapters and merge them one after the other into a network's state dict.

    Args:
        network: the network, for its modules.
        state: the whole state dict with diffusers' keys.
        sources: see `lora_files.read_lora`.
        strengths: one for each.
        reading: `key` and `module_filters` of `read_lora`.

    Raises:
        ConfigError: an adapter that does not fit the network.
    """
    for source, strength in zip(sources, strengths, strict=True):
        lora = read_lora(source, modules=module_shapes(network), **reading)
        if lora.text_encoder or lora.tokens is not None:
            log.warning("%s: only what belongs to the network is merged; its text encoder part stays with it.", source)
        merge_lora_into(state, lora, strength)
