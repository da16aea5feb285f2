"""Autoencoders of diffusers, in and out: folders, and files under the names of the original code.

Must not live here: where files lie (weights_source.py), and modules (weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cascade_train.models.formats.export import quiet, read_back_error, reconstruction, replaced_directory
from cascade_train.models.formats.weights import StoredTensors
from cascade_train.models.formats.weights_source import find_weight_files

VAE = ("first_stage_model.", "vae.")
"""Beginnings of the names of an autoencoder's tensors in a file of a whole model."""

_RENAMED = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
"""An autoencoder's attention in older folders of diffusers."""


def read_vae(source: str, config: Mapping[str, Any], *, key: str) -> dict[str, Tensor]:
    """Return the tensors of an autoencoder of this diffusers config, under its names; `key` is for messages."""
    stored = read_belonging(source, key, "vae", lambda name: name.startswith(VAE))
    if not any("encoder.down." in name for name in stored):
        return {_renamed(name): tensor for name, tensor in stored.items()}
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint  # heavy

    converted: dict[str, Tensor] = convert_ldm_vae_checkpoint(stored, config)
    return converted


def read_belonging(source: str, key: str, part: str | None, belongs: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the stored tensors that belong to a part, or all where none is named as in a file of several parts."""
    with StoredTensors(find_weight_files(source, key=key, part=part), key=key) as tensors:
        names = list(tensors.shapes())
        return {name: tensors.read(name).clone() for name in [n for n in names if belongs(n)] or names}


def _renamed(name: str) -> str:
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    return name


def save_vae(config: Mapping[str, Any], state: Mapping[str, Tensor], directory: Path) -> float:
    """Write a folder that `AutoencoderKL.from_pretrained` loads, of these arguments, replacing `directory` at once.

    `state` is the whole state dict on the host, in the dtype to be written. Returns the relative difference of a fixed
    reconstruction after reading it back; a RunError leaves `directory` as it was.
    """
    from diffusers import AutoencoderKL  # heavy

    with torch.device("meta"):
        model = AutoencoderKL(**config)
    model.load_state_dict(dict(state), strict=True, assign=True)
    model = model.requires_grad_(requires_grad=False).eval()
    with replaced_directory(directory) as place, quiet():
        model.save_pretrained(place)
        loaded = AutoencoderKL.from_pretrained(place, torch_dtype=model.dtype)
        return read_back_error(model, loaded, directory, reconstruction)
