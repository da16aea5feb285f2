"""Whole models of Stable Diffusion in one file, under the names of the original code, by diffusers' own converters.

Lives here: what of such a file belongs to which part. Must not live here: the autoencoder (formats/autoencoder_kl.py),
where files lie (weights_source.py), and modules (weights.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.models.family import Layout, Stored, own_names
from cascade_train.models.formats.autoencoder_kl import read_belonging

UNET = "model.diffusion_model."
TOWERS = {
    "text_encoder": ("cond_stage_model.", "conditioner.embedders.0."),
    "text_encoder_2": ("conditioner.embedders.1.",),
}
"""Part -> beginnings of the names of its tensors; the second are SDXL's."""

OPEN_CLIP = ("cond_stage_model.model.", "conditioner.embedders.1.model.")
"""Beginnings of towers of OpenCLIP (SD 2 and SDXL's second), which fuse q, k and v."""


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


def read_text_tower(source: str, module: nn.Module, *, part: str) -> dict[str, Tensor]:
    """Return the tensors of a text tower in a single file, under the names of `module`, a class of transformers.

    Raises:
        ConfigError: the file holds no such tower.
    """
    from diffusers.loaders.single_file_utils import convert_ldm_clip_checkpoint, convert_open_clip_checkpoint  # heavy

    key = f"model.{part}.weights"
    stored = read_belonging(source, key, None, lambda name: name.startswith(TOWERS[part]))
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
