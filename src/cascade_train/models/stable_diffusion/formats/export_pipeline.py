"""Pipelines of Stable Diffusion out, of a built stage and a plain state dict: folders that diffusers loads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor

from cascade_train.models.autoencoder_kl import plain_vae
from cascade_train.models.formats.export import (
    build_plain_network,
    check_equal_tensors,
    copy_on_host,
    fixed_prediction,
    on_host,
    quiet,
    read_back_error,
    replaced_directory,
)
from cascade_train.models.lora import tower_name
from cascade_train.models.stable_diffusion.family import STABLE_DIFFUSION
from cascade_train.models.stage import below
from cascade_train.models.text_encoder import save_vocabulary, tokenizer_of_length

if TYPE_CHECKING:
    from cascade_train.models.stable_diffusion.stage import StableDiffusion


def save_pipeline(stage: StableDiffusion, state: Mapping[str, Tensor], directory: Path) -> float:
    """Write a folder that diffusers' pipeline of the family loads, replacing `directory` at once.

    The built stage's parts go along; what it left out is built. `state` is the network's whole state dict on the host,
    in the dtype to be written, with a root for it and each text tower where these trained. The scheduler samples as the
    objective does; where diffusers has none such, the folder holds what trained alone, as `unet/` and the towers.
    Returns the relative difference of a fixed prediction after reading it back; a RunError leaves `directory` alone.
    """
    stage.complete()
    towers = {name: below(name, state) for name, encoder in stage.text_encoders().items() if encoder.train}
    network_state = below("network", state) if towers else state
    network = build_plain_network(STABLE_DIFFUSION, stage.network.config, network_state)
    with replaced_directory(directory) as place, quiet():
        if stage.scheduler is None:
            network.save_pretrained(place / "unet")
            for name in towers:
                tower = copy_on_host(stage.text_encoders()[name].module, network.dtype, towers[name])
                _save_tower(tower, place / name)
        else:
            pipeline = _pipeline(network, stage, dict(stage.scheduler), towers)
            pipeline.save_pretrained(place)
            for name in stage.text_encoders():
                _save_tower(getattr(pipeline, name), place / name)
                tokenizer = name.replace("text_encoder", "tokenizer")
                save_vocabulary(getattr(pipeline, tokenizer), place / tokenizer)
        for name, tower in towers.items():
            found = type(stage.text_encoders()[name].module).from_pretrained(place / name, dtype=network.dtype)
            check_equal_tensors({n: v.to(network.dtype) for n, v in tower.items()}, found.state_dict(), directory)
        loaded = UNet2DConditionModel.from_pretrained(place / "unet", torch_dtype=network.dtype)
        return read_back_error(network, loaded, directory, partial(fixed_prediction, STABLE_DIFFUSION))


def _save_tower(tower: Any, folder: Path) -> None:
    """Write a text tower by the names of published folders; transformers 5.6 renamed what older ones look for."""
    tower.save_pretrained(folder, state_dict={tower_name(name): value for name, value in tower.state_dict().items()})


def _pipeline(
    network: UNet2DConditionModel,
    stage: StableDiffusion,
    scheduler: dict[str, Any],
    towers: Mapping[str, Mapping[str, Tensor]],
) -> Any:
    kind = getattr(diffusers, scheduler.pop("_class_name"))
    vae = plain_vae(stage.vae.arguments, on_host(stage.vae.module, network.dtype))
    parts: dict[str, Any] = {"unet": network, "vae": vae, "scheduler": kind(**scheduler)}
    for name, encoder in stage.text_encoders().items():
        parts[name] = copy_on_host(encoder.module, network.dtype, towers.get(name))
        parts[name.replace("text_encoder", "tokenizer")] = tokenizer_of_length(encoder)
    if "text_encoder_2" in parts:  # the empty caption is encoded, as in training
        return StableDiffusionXLPipeline(**parts, force_zeros_for_empty_prompt=False, add_watermarker=False)
    return StableDiffusionPipeline(**parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False)
