"""Whole models of Stable Diffusion in one file, under the original code's names, which diffusers' converters read."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import stored_mapping
from cascade_train.models.autoencoder_kl import VAE, converter, read_vae
from cascade_train.models.family import NameLayout, Stored, own_names
from cascade_train.models.formats.export import check_equal_tensors, model_spec, quiet, replaced_file
from cascade_train.models.formats.weights import open_weights, read_belonging, write_tensors
from cascade_train.models.stable_diffusion.formats.original_names import (
    clip_tensors,
    of_unet,
    open_clip_tensors,
    unet_tensors,
    vae_tensors,
)

log = logging.getLogger(__name__)

UNET = "model.diffusion_model."
TOWERS = {
    "text_encoder": ("cond_stage_model.", "conditioner.embedders.0."),
    "text_encoder_2": ("conditioner.embedders.1.",),
}
"""Part -> beginnings of the names of its tensors; the second are SDXL's."""

OPEN_CLIP = ("cond_stage_model.model.", "conditioner.embedders.1.model.")
"""Beginnings of towers of OpenCLIP (SD 2 and SDXL's second), which fuse q, k and v."""

OPEN_CLIP_WIDTH = 1024
"""Hidden size of the text tower of Stable Diffusion 2, which is OpenCLIP's; 1.x has another."""


def original_layout(config: Mapping[str, Any], marker: str, convert: str) -> NameLayout:
    """Return the layout of a network of this diffusers config, stored under diffusers' names or the original's.

    `marker` is how a name of the original begins, as a pattern; `convert` is diffusers' function that renames them.
    """

    def layout(stored_names: Iterable[str]) -> dict[str, Stored]:
        names = list(stored_names)
        if not any(re.match(marker, name) for name in names):
            return own_names(names)
        converted = converter(convert)({name: name for name in names}, config)  # renames, and reads no tensor
        return {name: Stored(stored) for name, stored in converted.items() if stored is not None}

    return layout


def unet_layout(config: Mapping[str, Any]) -> NameLayout:
    """Return the layout of a UNet of this diffusers config, which may be stored in a file with other parts."""
    return original_layout(config, re.escape(UNET), "convert_ldm_unet_checkpoint")


def read_text_tower(source: str, module: nn.Module, *, part: str) -> dict[str, Tensor]:
    """Return the tensors of a text tower in a single file, under the names of `module`, a class of transformers."""
    key = f"model.{part}.weights"
    stored = read_belonging(source, key, None, lambda name: name.startswith(TOWERS[part]))
    if not any(name.startswith(TOWERS[part]) for name in stored):
        raise ConfigError(
            f"{key}={source}: this file holds no such tower; name another, or the folder or hub id of a pipeline"
        )
    prefix = next((each for each in OPEN_CLIP if any(name.startswith(each) for name in stored)), None)
    if prefix is None:
        found = converter("convert_ldm_clip_checkpoint")(stored)
    else:
        found = converter("convert_open_clip_checkpoint")(module, stored, prefix=prefix)
    outer = "" if hasattr(module, "text_model") else "text_model."
    return {name.removeprefix(outer): each for name, each in found.items() if not name.endswith("position_ids")}


def save_single_file(folder: Path, out: Path, *, dtype: torch.dtype | None, title: str = "Checkpoint") -> float:
    """Write the pipeline in a folder of diffusers as one file, replacing `out`; return 0, its error.

    `dtype` None = as the tensors are stored; `title` is for the header. Each part is read back by diffusers'
    converters and compared bit for bit (RunError). The scheduler has no place in such a file.
    """
    names = [name for name in sorted(("unet", "vae", *TOWERS)) if (folder / name).is_dir()]
    parts = {name: read_part(folder, name, dtype) for name in names}
    for name in ("unet", "vae", "text_encoder"):
        if name not in parts:
            raise ConfigError(f"from={folder}: the pipeline has no {name}, so that one file cannot hold it; add it")
    whole: dict[str, Tensor] = {f"{UNET}{name}": tensor for name, tensor in unet_tensors(parts["unet"]).items()}
    whole |= {f"{VAE[0]}{name}": tensor for name, tensor in vae_tensors(parts["vae"]).items()}
    is_xl = "text_encoder_2" in parts
    for name in TOWERS.keys() & parts.keys():
        of_sd2 = not is_xl and part_config(folder, name)["hidden_size"] == OPEN_CLIP_WIDTH
        named = (open_clip_tensors if of_sd2 or name == "text_encoder_2" else clip_tensors)(parts[name])
        whole |= {f"{TOWERS[name][-1 if is_xl else 0]}{each}": tensor for each, tensor in named.items()}
    if is_xl and len({part_config(folder, name)["hidden_size"] for name in TOWERS}) == 1:
        log.warning("%s: both text towers have one width, by which diffusers' from_single_file tells them apart.", out)
    with replaced_file(out) as partial, quiet():
        write_tensors(partial, whole, {"format": "pt", **_header(folder, title)})
        for name, state in parts.items():
            check_equal_tensors(_unprefixed(state), _unprefixed(_read_back(folder, name, partial)), out)
    return 0.0


def _unprefixed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a part's tensors without what versions of transformers put before a text tower's names, or do not."""
    return {name.removeprefix("text_model."): tensor for name, tensor in state.items()}


def _header(folder: Path, title: str) -> dict[str, str]:
    schedule = stored_mapping(folder / "scheduler" / "scheduler_config.json")
    prediction = "flow" if "FlowMatch" in str(schedule.get("_class_name")) else schedule.get("prediction_type")
    own = of_unet(part_config(folder, "unet"), is_lora=False, prediction=prediction)
    return model_spec(own, title, is_lora=False)


def part_config(folder: Path, part: str) -> dict[str, Any]:
    """Return the configuration of a part of a pipeline."""
    return stored_mapping(folder / part / "config.json")


def read_part(folder: Path, part: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the floating tensors of a part of a pipeline, in a dtype; None = as they are stored."""
    if part == "vae":  # older folders name its attention otherwise
        stored = read_vae(str(folder / part), part_config(folder, part), key="from")
    else:
        with open_weights(str(folder / part), key="from") as tensors:
            stored = {name: value.clone() for name, value in tensors.items()}
    floating = {name: value for name, value in stored.items() if value.is_floating_point()}
    return {name: value if dtype is None else value.to(dtype) for name, value in floating.items()}


def _read_back(folder: Path, part: str, file: Path) -> Mapping[str, Tensor]:
    config = part_config(folder, part)
    if part == "vae":
        return read_vae(str(file), config, key="export")
    if part == "unet":
        with open_weights(str(file), key="export", layout=unet_layout(config)) as tensors:
            return dict(tensors.items())
    from transformers import CLIPTextModel, CLIPTextModelWithProjection  # heavy

    kind: Any = CLIPTextModelWithProjection if part == "text_encoder_2" else CLIPTextModel
    with torch.device("meta"):
        module = kind(kind.config_class.from_pretrained(folder / part))
    return read_text_tower(str(file), module, part=part)
