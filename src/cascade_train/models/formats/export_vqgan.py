"""Stage A's weights out: a folder of diffusers and the original's single file, read back and compared.

Takes plain state dicts, gathered from their shards by the caller, on one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade_train.models.formats.export import Exported, check_equal_tensors, checked_error, quiet, replaced_directory
from cascade_train.models.latent_codec import ORIGINAL_NAMES

ORIGINAL_FILE = "stage_a.safetensors"
"""What the original calls its file."""

_PROBE_PX = 32


def save_vqgan(state: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path) -> Exported:
    """Write a folder that `PaellaVQModel.from_pretrained` loads, replacing `directory` at once.

    Args:
        state: the whole state dict with diffusers' keys, on the host.
        config: arguments of the `PaellaVQModel`.
        directory: appears when all is written and verified.

    Raises:
        RunError: what was read back differs; `directory` is as it was.
    """
    model = _plain(config, state)
    with replaced_directory(directory) as partial, quiet():
        model.save_pretrained(partial)
        loaded = PaellaVQModel.from_pretrained(partial).eval()
        return _compared(model, loaded, directory)


def save_original(state: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path) -> Exported:
    """Write a folder with the original's single file in it, `stage_a.safetensors`, replacing `directory` at once.

    Args:
        state: the whole state dict with diffusers' keys, on the host.
        config: arguments of the `PaellaVQModel`, to compare with.
        directory: appears when all is written and verified.

    Raises:
        RunError: what was read back differs; `directory` is as it was.
    """
    model = _plain(config, state)
    with replaced_directory(directory) as partial:
        tensors = {_renamed(name, new_to_old=True): value.contiguous() for name, value in model.state_dict().items()}
        save_file(tensors, partial / ORIGINAL_FILE, metadata={"format": "pt"})
        stored = {_renamed(n, new_to_old=False): value for n, value in load_file(partial / ORIGINAL_FILE).items()}
        return _compared(model, _plain(config, stored), directory)


def _plain(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> PaellaVQModel:
    with torch.device("meta"):
        model = PaellaVQModel(**config)
    model.load_state_dict(dict(state), strict=True, assign=True)
    return model.requires_grad_(requires_grad=False).eval()


def _renamed(name: str, *, new_to_old: bool) -> str:
    for old, new in ORIGINAL_NAMES.items():
        begins, becomes = (new, old) if new_to_old else (old, new)
        if name.startswith(begins):
            return becomes + name.removeprefix(begins)
    return name


def _compared(model: PaellaVQModel, loaded: PaellaVQModel, directory: Path) -> Exported:
    check_equal_tensors(model.state_dict(), loaded.state_dict(), directory)
    picture = torch.rand(1, 3, _PROBE_PX, _PROBE_PX, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = (each(picture).sample for each in (model, loaded))
    return Exported(path=directory, max_error=checked_error(expected, found, torch.float32, directory))
