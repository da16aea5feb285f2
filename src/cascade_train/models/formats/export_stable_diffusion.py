"""Pipelines of Stable Diffusion out, of a built stage and a plain state dict: folders that diffusers loads.

Must not live here: how they take their place and are compared (export.py), and pipelines of the cascade
(export_pipelines.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor

from cascade_train.models.formats.export import (
    build_plain_network,
    quiet,
    read_back_error,
    reconstruction,
    replaced_directory,
)
from cascade_train.models.formats.export_pipelines import copy_on_host, on_host, tokenizer_of_length

if TYPE_CHECKING:
    from cascade_train.models.stable_diffusion import StableDiffusion


def save_pipeline(stage: StableDiffusion, state: Mapping[str, Tensor], directory: Path) -> float:
    """Write a folder that diffusers' pipeline of the family loads, replacing `directory` at once.

    The built stage's parts go along; what it left out is built. `state` is the network's whole state dict on the host,
    in the dtype to be written. Its scheduler samples as the objective does; where diffusers has none such, the folder
    holds the network alone, in `unet/`. Returns the relative difference of a fixed prediction after reading it back; a
    RunError leaves `directory` as it was.
    """
    stage.complete()
    network = build_plain_network(stage.network.config, state)
    with replaced_directory(directory) as partial, quiet():
        if stage.scheduler is None:
            network.save_pretrained(partial / "unet")
        else:
            _pipeline(network, stage, dict(stage.scheduler)).save_pretrained(partial)
        loaded = UNet2DConditionModel.from_pretrained(partial / "unet", torch_dtype=network.dtype)
        return read_back_error(network, loaded, directory)


def save_vae(config: Mapping[str, Any], state: Mapping[str, Tensor], directory: Path) -> float:
    """Write a folder that `AutoencoderKL.from_pretrained` loads, as `save_pipeline` does, of these arguments."""
    with torch.device("meta"):
        model = AutoencoderKL(**config)
    model.load_state_dict(dict(state), strict=True, assign=True)
    model = model.requires_grad_(requires_grad=False).eval()
    with replaced_directory(directory) as partial, quiet():
        model.save_pretrained(partial)
        loaded = AutoencoderKL.from_pretrained(partial, torch_dtype=model.dtype)
        return read_back_error(model, loaded, directory, reconstruction)


def _pipeline(network: UNet2DConditionModel, stage: StableDiffusion, scheduler: dict[str, Any]) -> Any:
    kind = getattr(diffusers, scheduler.pop("_class_name"))
    vae = AutoencoderKL(**stage.vae.arguments)
    vae.load_state_dict(on_host(stage.vae.module, network.dtype), strict=True, assign=True)
    parts: dict[str, Any] = {"unet": network, "vae": vae.eval(), "scheduler": kind(**scheduler)}
    for number in ("", "_2"):
        encoder = getattr(stage, f"text_encoder{number}", None)
        if encoder is not None:
            parts[f"text_encoder{number}"] = copy_on_host(encoder.module, network.dtype)
            parts[f"tokenizer{number}"] = tokenizer_of_length(encoder)
    if "text_encoder_2" in parts:  # the empty caption is encoded, as in training
        return StableDiffusionXLPipeline(**parts, force_zeros_for_empty_prompt=False, add_watermarker=False)
    return StableDiffusionPipeline(**parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False)
