"""Stage A out: a folder of diffusers, or the original's file, read back and compared before it counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.models.cascade.latent_codec import ORIGINAL_NAMES
from cascade_train.models.formats.export import quiet, read_back_error, reconstruction, replaced_directory
from cascade_train.models.formats.weights import replace_prefix

if TYPE_CHECKING:
    from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel

STAGE_A_FILE = "stage_a.safetensors"
"""The original's name of Stage A's file."""


def save_vqgan(
    config: Mapping[str, Any], state: Mapping[str, Tensor], directory: Path, *, original: bool = False
) -> float:
    """Write a folder that `PaellaVQModel.from_pretrained` loads, as `save_network` does.

    `config` are the arguments of the `PaellaVQModel`. `original`: the folder holds the original's single file,
    `stage_a.safetensors`, instead.
    """
    model = plain_vqgan(config, state)
    with replaced_directory(directory) as partial, quiet():
        if original:
            originals = {new: old for old, new in ORIGINAL_NAMES.items()}
            tensors = {replace_prefix(name, originals): each.contiguous() for name, each in model.state_dict().items()}
            save_file(tensors, partial / STAGE_A_FILE, metadata={"format": "pt"})
            stored = load_file(partial / STAGE_A_FILE)
            loaded = plain_vqgan(config, {replace_prefix(n, ORIGINAL_NAMES): each for n, each in stored.items()})
        else:
            model.save_pretrained(partial)
            loaded = type(model).from_pretrained(partial).eval()
        return read_back_error(model, loaded, directory, reconstruction)


def plain_vqgan(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> PaellaVQModel:
    """Return diffusers' own class around `state`, sharing its memory."""
    from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel  # only Stage A's

    with torch.device("meta"):
        model = PaellaVQModel(**config)
    model.load_state_dict(dict(state), strict=True, assign=True)
    return model.requires_grad_(requires_grad=False).eval()
