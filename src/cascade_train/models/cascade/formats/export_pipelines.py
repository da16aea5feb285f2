"""Pipelines out, of built stages and plain state dicts: folders that diffusers' pipelines load.

They are written without those pipelines, whose import brings all networks of diffusers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import diffusers
from diffusers.schedulers.scheduling_ddpm_wuerstchen import DDPMWuerstchenScheduler
from torch import Tensor

from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.cascade.latent_codec import plain_vqgan
from cascade_train.models.cascade.networks.unet import StableCascadeUNet
from cascade_train.models.cascade.semantic_compressor import EfficientNetCompressor
from cascade_train.models.formats.export import (
    build_plain_network,
    copy_on_host,
    fixed_prediction,
    on_host,
    quiet,
    read_back_error,
    replaced_directory,
)
from cascade_train.models.text_encoder import save_vocabulary, tokenizer_of_length

if TYPE_CHECKING:
    from cascade_train.models.cascade.stage_b import StageB
    from cascade_train.models.cascade.stage_c import StageC

PUBLISHED_LATENT_SCALE = 10.67
"""Positions of Stage A's latents for each semantic one where Stage B decodes 24 x 24 to 1024 x 1024 pixels."""


def save_prior(stage: StageC, state: Mapping[str, Tensor], directory: Path) -> float:
    """Write a folder that `StableCascadePriorPipeline.from_pretrained` loads, replacing `directory` at once.

    The built stage's parts go along; what it left out is built. `state` is the network's whole state dict on the host,
    in the dtype to be written. Returns the relative difference of a fixed prediction after reading it back; a RunError
    leaves `directory` as it was. Where the pipeline does not sample as the objective does, the folder holds the network
    alone, in `prior/`.
    """
    networks = {"prior": _plain_network(stage, state)}
    if not _in_pipelines(stage):
        return _save(directory, None, networks, networks)
    settings = {"resolution_multiple": stage.semantic_compressor.resolution_multiple}
    parts = _prior_parts(networks["prior"], stage)
    return _save(directory, "StableCascadePriorPipeline", parts, networks, settings)


def save_decoder(stage: StageB, state: Mapping[str, Tensor], directory: Path) -> float:
    """Write a folder that `StableCascadeDecoderPipeline.from_pretrained` loads; otherwise as `save_prior`.

    With a Stage A that no pipeline of diffusers has, too, the folder holds the network alone, in `decoder/`.
    """
    networks = {"decoder": _plain_network(stage, state)}
    if not (stage.stage_a.in_pipelines and _in_pipelines(stage)):
        return _save(directory, None, networks, networks)
    parts = _decoder_parts(networks["decoder"], stage)
    return _save(directory, "StableCascadeDecoderPipeline", parts, networks, {"latent_dim_scale": _latent_scale(stage)})


def _plain_network(stage: StageB | StageC, state: Mapping[str, Tensor]) -> StableCascadeUNet:
    stage.complete()
    return build_plain_network(CASCADE, stage.network.config, state)


def _in_pipelines(stage: StageB | StageC) -> bool:
    """Return whether diffusers' pipelines of the cascade, which know one scheduler, sample as the objective does."""
    return stage.scheduler is not None and stage.scheduler["_class_name"] == DDPMWuerstchenScheduler.__name__


def _scheduler(stage: StageB | StageC) -> DDPMWuerstchenScheduler:
    assert stage.scheduler is not None, "of `_in_pipelines`"
    return DDPMWuerstchenScheduler(s=stage.scheduler["s"])


def _save(
    directory: Path,
    pipeline: str | None,
    parts: Mapping[str, Any],
    networks: Mapping[str, StableCascadeUNet],
    settings: Mapping[str, float] = MappingProxyType({}),
) -> float:
    """Write the parts of a pipeline and read back its networks; without a pipeline's name there is no index."""
    with replaced_directory(directory) as place, quiet():
        for name, part in parts.items():
            if part is not None:
                part.save_pretrained(place / name)
            if name.endswith("tokenizer"):
                save_vocabulary(part, place / name)
        if pipeline is not None:
            _write_index(place, pipeline, parts, settings)
        errors = []
        for name, network in networks.items():
            loaded = StableCascadeUNet.from_pretrained(place / name, torch_dtype=network.dtype)
            errors.append(read_back_error(network, loaded, directory, partial(fixed_prediction, CASCADE)))
        return max(errors)


def _prior_parts(network: StableCascadeUNet, stage: StageC) -> dict[str, Any]:
    from transformers import CLIPImageProcessor

    tower = None if stage.image_encoder is None else stage.image_encoder.module
    side = None if tower is None else tower.config.image_size
    crop = {"height": side, "width": side}
    return {
        "tokenizer": tokenizer_of_length(stage.text_encoder),
        "text_encoder": copy_on_host(stage.text_encoder.module, network.dtype),
        "prior": network,
        "scheduler": _scheduler(stage),
        "image_encoder": None if tower is None else copy_on_host(tower, network.dtype),
        "feature_extractor": None if side is None else CLIPImageProcessor(size={"shortest_edge": side}, crop_size=crop),
    }


def _decoder_parts(network: StableCascadeUNet, stage: StageB) -> dict[str, Any]:
    codec = stage.stage_a
    return {
        "decoder": network,
        "tokenizer": tokenizer_of_length(stage.text_encoder),
        "text_encoder": copy_on_host(stage.text_encoder.module, network.dtype),
        "scheduler": _scheduler(stage),
        "vqgan": plain_vqgan(codec.arguments, on_host(codec.module, network.dtype)),
    }


def _latent_scale(stage: StageB) -> float:
    """Return the positions of Stage A's latents for each semantic one."""
    compressor = stage.semantic_compressor
    published = isinstance(compressor, EfficientNetCompressor)
    return PUBLISHED_LATENT_SCALE if published else compressor.stride / stage.stage_a.stride


def _write_index(place: Path, name: str, parts: Mapping[str, Any], settings: Mapping[str, float]) -> None:
    """Write what `save_pretrained` of a pipeline of this class would: its settings, and the classes of its parts.

    Of classes in its own pipelines diffusers writes its top level, where it does not find them again; here the module.
    """
    index: dict[str, Any] = {"_class_name": name, "_diffusers_version": diffusers.__version__, **settings}
    for title, part in parts.items():
        module = type(part).__module__
        library = module if module.startswith("diffusers.pipelines.") else module.partition(".")[0]
        index[title] = (None, None) if part is None else (library, type(part).__name__)
    (place / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
