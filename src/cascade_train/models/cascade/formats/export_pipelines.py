"""Pipelines out, of built stages and plain state dicts: folders that diffusers' pipelines load.

They are written without those pipelines, whose import brings all networks of diffusers.

Must not live here: how they take their place and are compared (export.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
from diffusers.schedulers.scheduling_ddpm_wuerstchen import DDPMWuerstchenScheduler
from torch import Tensor

from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.formats.export_vqgan import plain_vqgan
from cascade_train.models.cascade.networks.unet import StableCascadeUNet
from cascade_train.models.cascade.semantic_compressor import EfficientNetCompressor
from cascade_train.models.formats.export import (
    build_plain_network,
    fixed_prediction,
    quiet,
    read_back_error,
    replaced_directory,
)
from cascade_train.models.formats.pipeline_parts import copy_on_host, on_host, tokenizer_of_length

if TYPE_CHECKING:
    from transformers import CLIPImageProcessor

    from cascade_train.models.cascade.stage_b import StageB
    from cascade_train.models.cascade.stage_c import StageC

PUBLISHED_LATENT_SCALE = 10.67
"""Positions of Stage A's latents for each semantic one where Stage B decodes 24 x 24 to 1024 x 1024 pixels."""


def save_prior(stage: StageC, state: Mapping[str, Tensor], directory: Path) -> float:
    """Write a folder that `StableCascadePriorPipeline.from_pretrained` loads, replacing `directory` at once.

    The built stage's parts go along; what it left out is built. `state` is the network's whole state dict on the host,
    in the dtype to be written. Returns the relative difference of a fixed prediction after reading it back; a RunError
    leaves `directory` as it was. The pipeline's scheduler is the cosine schedule with epsilon prediction, which does
    not fit a network trained for another objective.
    """
    stage.complete()
    network = build_plain_network(CASCADE, stage.network.config, state)
    with replaced_directory(directory) as place, quiet():
        multiple = stage.semantic_compressor.resolution_multiple
        _write_pipeline(place, "StableCascadePriorPipeline", _prior_parts(network, stage), resolution_multiple=multiple)
        return _folder_error(network, place / "prior", directory)


def save_decoder(stage: StageB, state: Mapping[str, Tensor], directory: Path) -> float:
    """Write a folder that `StableCascadeDecoderPipeline.from_pretrained` loads; otherwise as `save_prior`.

    With a Stage A that no pipeline of diffusers has, the folder holds the network alone, in `decoder/`.
    """
    stage.complete()
    network = build_plain_network(CASCADE, stage.network.config, state)
    with replaced_directory(directory) as place, quiet():
        if stage.stage_a.in_pipelines:
            scale = _latent_scale(stage)
            _write_pipeline(
                place, "StableCascadeDecoderPipeline", _decoder_parts(network, stage), latent_dim_scale=scale
            )
        else:
            network.save_pretrained(place / "decoder")
        return _folder_error(network, place / "decoder", directory)


def save_combined(
    prior: StageC,
    prior_state: Mapping[str, Tensor],
    decoder: StageB,
    decoder_state: Mapping[str, Tensor],
    directory: Path,
) -> float:
    """Write a folder that `StableCascadeCombinedPipeline.from_pretrained` loads; otherwise as `save_prior`.

    That pipeline knows one compression, of 42.67 pixels for each of Stage C's latent positions, whatever the stages
    were trained with.
    """
    for stage in (prior, decoder):
        stage.complete()
    first = build_plain_network(CASCADE, prior.network.config, prior_state)
    second = build_plain_network(CASCADE, decoder.network.config, decoder_state)
    with replaced_directory(directory) as place, quiet():
        of_prior = {f"prior_{name}": part for name, part in _prior_parts(first, prior).items()}
        parts = _decoder_parts(second, decoder) | of_prior
        _write_pipeline(place, "StableCascadeCombinedPipeline", parts)
        written = ((first, place / "prior_prior"), (second, place / "decoder"))
        return max(_folder_error(*each, directory) for each in written)


def _folder_error(network: StableCascadeUNet, written: Path, directory: Path) -> float:
    loaded = StableCascadeUNet.from_pretrained(written, torch_dtype=network.dtype)
    return read_back_error(network, loaded, directory, partial(fixed_prediction, CASCADE))


def _prior_parts(network: StableCascadeUNet, stage: StageC) -> dict[str, Any]:
    tower = None if stage.image_encoder is None else stage.image_encoder.module
    return {
        "tokenizer": tokenizer_of_length(stage.text_encoder),
        "text_encoder": copy_on_host(stage.text_encoder.module, network.dtype),
        "prior": network,
        "scheduler": DDPMWuerstchenScheduler(),
        "image_encoder": None if tower is None else copy_on_host(tower, network.dtype),
        "feature_extractor": None if tower is None else _image_processor(tower.config.image_size),
    }


def _decoder_parts(network: StableCascadeUNet, stage: StageB) -> dict[str, Any]:
    codec = stage.stage_a
    return {
        "decoder": network,
        "tokenizer": tokenizer_of_length(stage.text_encoder),
        "text_encoder": copy_on_host(stage.text_encoder.module, network.dtype),
        "scheduler": DDPMWuerstchenScheduler(),
        "vqgan": plain_vqgan(codec.arguments, on_host(codec.module, network.dtype)),
    }


def _latent_scale(stage: StageB) -> float:
    """Return the positions of Stage A's latents for each semantic one."""
    compressor = stage.semantic_compressor
    published = isinstance(compressor, EfficientNetCompressor)
    return PUBLISHED_LATENT_SCALE if published else compressor.stride / stage.stage_a.stride


def _write_pipeline(directory: Path, name: str, parts: Mapping[str, Any], **settings: float) -> None:
    """Write what `save_pretrained` of a pipeline of this class would: its parts, and its settings beside their classes.

    Of classes in its own pipelines diffusers writes its top level, where it does not find them again; here their place.
    """
    index: dict[str, Any] = {"_class_name": name, "_diffusers_version": diffusers.__version__, **settings}
    for title, part in parts.items():
        index[title] = (None, None)
        if part is not None:
            part.save_pretrained(directory / title)
            place = type(part).__module__
            is_top = not place.startswith("diffusers.pipelines.")
            index[title] = (place.partition(".")[0] if is_top else place, type(part).__name__)
    (directory / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _image_processor(side: int) -> CLIPImageProcessor:
    from transformers import CLIPImageProcessor  # only of image towers

    return CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
