"""Pipelines of Stable Diffusion out as one file, under the names of the original code, of a folder of diffusers.

Must not live here: the names (original_names.py), and how such a file is read (single_file.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import stored_mapping
from cascade_train.models.formats.autoencoder_kl import VAE, read_vae
from cascade_train.models.formats.export import check_equal_tensors, quiet, replaced_file
from cascade_train.models.formats.model_spec import model_spec
from cascade_train.models.formats.weights import open_weights, write_tensors
from cascade_train.models.stable_diffusion.formats.model_spec import of_unet
from cascade_train.models.stable_diffusion.formats.original_names import (
    clip_tensors,
    open_clip_tensors,
    unet_tensors,
    vae_tensors,
)
from cascade_train.models.stable_diffusion.formats.single_file import (
    TOWERS,
    UNET,
    read_text_tower,
    unet_layout,
)

log = logging.getLogger(__name__)

OPEN_CLIP_WIDTH = 1024
"""Hidden size of the text tower of Stable Diffusion 2, which is OpenCLIP's; 1.x has another."""


def save_single_file(folder: Path, out: Path, *, dtype: torch.dtype | None, title: str = "Checkpoint") -> float:
    """Write the pipeline in a folder of diffusers as one file, replacing `out`; return 0, its error.

    `dtype` None = as the tensors are stored; `title` is for the header. Each part is read back by diffusers'
    converters and compared bit for bit (RunError). The scheduler has no place in such a file.

    Raises:
        ConfigError: a part that is not there or cannot be read.
    """
    parts = {path.name: read_part(folder, path.name, dtype) for path in sorted(folder.iterdir()) if _has_weights(path)}
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
            check_equal_tensors(state, _read_back(folder, name, partial), out)
    return 0.0


def _header(folder: Path, title: str) -> dict[str, str]:
    prediction = stored_mapping(folder / "scheduler" / "scheduler_config.json").get("prediction_type")
    own = of_unet(part_config(folder, "unet"), is_lora=False, prediction=prediction)
    return model_spec(own, title, is_lora=False)


def _has_weights(path: Path) -> bool:
    return path.is_dir() and path.name in ("unet", "vae", *TOWERS)


def part_config(folder: Path, part: str) -> dict[str, Any]:
    """Return the configuration of a part of a pipeline."""
    return stored_mapping(folder / part / "config.json")


def read_part(folder: Path, part: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the floating tensors of a part of a pipeline, in a dtype; None = as they are stored."""
    if part == "vae":  # older folders name its attention otherwise
        stored = read_vae(str(folder / part), part_config(folder, part), key="from")
    else:
        with open_weights(str(folder / part), key="from") as tensors:
            stored = {name: tensors.read(name).clone() for name in tensors.shapes()}
    floating = {name: value for name, value in stored.items() if value.is_floating_point()}
    return {name: value if dtype is None else value.to(dtype) for name, value in floating.items()}


def _read_back(folder: Path, part: str, file: Path) -> Mapping[str, Tensor]:
    config = part_config(folder, part)
    if part == "vae":
        return read_vae(str(file), config, key="export")
    if part == "unet":
        with open_weights(str(file), key="export", layout=unet_layout(config)) as tensors:
            return {name: tensors.read(name) for name in tensors.shapes()}
    from transformers import CLIPTextModel, CLIPTextModelWithProjection  # heavy

    kind: Any = CLIPTextModelWithProjection if part == "text_encoder_2" else CLIPTextModel
    with torch.device("meta"):
        module = kind(kind.config_class.from_pretrained(folder / part))
    return read_text_tower(str(file), module, part=part)
