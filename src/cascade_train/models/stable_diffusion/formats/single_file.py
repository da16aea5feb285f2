"""Whole models of Stable Diffusion in one file, under the names of the original code, by diffusers' own converters.

Lives here: what of such a file belongs to which part, and what the names of older folders of diffusers have become.
Must not live here: where files lie (weights_source.py), and modules (weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.formats.weights_source import SINGLE_FILE_SUFFIXES, find_weight_files
from cascade_train.models.formats.weights_tensors import Layout, Stored, StoredTensors, own_names

UNET = "model.diffusion_model."
VAE = ("first_stage_model.", "vae.")
TOWERS = {
    "text_encoder": ("cond_stage_model.", "conditioner.embedders.0."),
    "text_encoder_2": ("conditioner.embedders.1.",),
}
"""Part -> beginnings of the names of its tensors; the second are SDXL's."""

OPEN_CLIP = ("cond_stage_model.model.", "conditioner.embedders.1.model.")
"""Beginnings of towers of OpenCLIP (SD 2 and SDXL's second), which fuse q, k and v."""

_RENAMED = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
"""An autoencoder's attention in older folders of diffusers."""


def unet_layout(config: Mapping[str, Any]) -> Layout:
    """Return the layout of a UNet of this diffusers config, which may be stored in a file with other parts."""

    def layout(stored_names: Iterable[str]) -> dict[str, Stored]:
        names = list(stored_names)
        if not any(name.startswith(UNET) for name in names):
            return own_names(names)
        from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint  # heavy

        converted = convert_ldm_unet_checkpoint({name: name for name in names}, config)  # renames, and reads no tensor
        return {name: Stored(stored) for name, stored in converted.items() if stored is not None}

    return layout


def is_single_file(source: str) -> bool:
    """Return whether a source of weights names a file, here or on the hub."""
    return source.endswith(SINGLE_FILE_SUFFIXES)


def read_vae(source: str, config: Mapping[str, Any], *, key: str) -> dict[str, Tensor]:
    """Return the tensors of an autoencoder of this diffusers config, under its names; `key` is for messages."""
    stored = _read(source, key, "vae", lambda name: name.startswith(VAE))
    if not any("encoder.down." in name for name in stored):
        return {_renamed(name): tensor for name, tensor in stored.items()}
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint  # heavy

    converted: dict[str, Tensor] = convert_ldm_vae_checkpoint(stored, config)
    return converted


def read_text_tower(source: str, module: nn.Module, *, part: str) -> dict[str, Tensor]:
    """Return the tensors of a text tower in a single file, under the names of `module`, a class of transformers.

    Raises:
        ConfigError: the file holds no such tower.
    """
    from diffusers.loaders.single_file_utils import convert_ldm_clip_checkpoint, convert_open_clip_checkpoint  # heavy

    key = f"model.{part}.weights"
    stored = _read(source, key, None, lambda name: name.startswith(TOWERS[part]))
    if not any(name.startswith(TOWERS[part]) for name in stored):
        raise ConfigError(
            f"{key}={source}: this file holds no such tower; name another, or the folder or hub id of a pipeline"
        )
    prefix = next((each for each in OPEN_CLIP if any(name.startswith(each) for name in stored)), None)
    if prefix is None:
        found = convert_ldm_clip_checkpoint(stored)
    else:
        found = convert_open_clip_checkpoint(module, stored, prefix=prefix)
    outer = "" if hasattr(module, "text_model") else "text_model."
    return {name.removeprefix(outer): each for name, each in found.items() if not name.endswith("position_ids")}


def _read(source: str, key: str, part: str | None, belongs: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the stored tensors that belong to a part, or all where none is named as in a file of several parts."""
    with StoredTensors(find_weight_files(source, key=key, part=part), key=key) as tensors:
        names = list(tensors.shapes())
        return {name: tensors.read(name).clone() for name in [n for n in names if belongs(n)] or names}


def _renamed(name: str) -> str:
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    return name
