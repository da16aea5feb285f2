"""Pipelines out: folders that diffusers' prior, decoder and combined pipelines load.

Takes plain state dicts on one process. Must not live here: how they take their place and are compared (export.py).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DDPMWuerstchenScheduler,
    StableCascadeCombinedPipeline,
    StableCascadeDecoderPipeline,
    StableCascadePriorPipeline,
    StableCascadeUNet,
)
from torch import Tensor, nn
from transformers import CLIPImageProcessor

from cascade_train.models.formats.export import (
    Exported,
    build_plain_network,
    network_config,
    quiet,
    read_back_error,
    replaced_directory,
)
from cascade_train.models.latent_codec import VQGAN
from cascade_train.models.semantic_compressor import EfficientNetCompressor
from cascade_train.models.stage_b import StageB
from cascade_train.models.stage_c import StageC

PUBLISHED_RESOLUTION_MULTIPLE = 42.67
"""Pixels of the finished image per latent position where Stage B decodes 24 x 24 to 1024 x 1024 pixels."""

PUBLISHED_LATENT_SCALE = 10.67
"""Positions of Stage A's latents for each semantic one where Stage B decodes 24 x 24 to 1024 x 1024 pixels."""


@dataclass(frozen=True, kw_only=True)
class PipelineParts:
    """What every pipeline consists of, beside the weights of its network.

    Captions are truncated and padded to `max_tokens`.
    """

    network_config: Mapping[str, Any]
    text_encoder: nn.Module
    tokenizer: Any
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class PriorParts(PipelineParts):
    """What a prior pipeline consists of.

    Attributes:
        resolution_multiple: pixels of the finished image per latent position.
        image_encoder: the frozen `CLIPVisionModelWithProjection`; None = no image prompts.
    """

    resolution_multiple: float
    image_encoder: nn.Module | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderParts(PipelineParts):
    """What a decoder pipeline consists of.

    Attributes:
        latent_scale: positions of Stage A's latents for each semantic one.
        vqgan: Stage A, a `PaellaVQModel`; None = a Stage A that no pipeline of diffusers has: only the network is
            written.
    """

    latent_scale: float
    vqgan: nn.Module | None


def prior_parts(stage: StageC) -> PriorParts:
    """Return what a built Stage C gives to a prior pipeline; builds what `left_out` names."""
    return PriorParts(
        **_shared_parts(stage),
        resolution_multiple=resolution_multiple(stage),
        image_encoder=None if stage.image_encoder is None else stage.image_encoder.module,
    )


def decoder_parts(stage: StageB) -> DecoderParts:
    """Return what a built Stage B gives to a decoder pipeline; builds what `left_out` names."""
    published = isinstance(stage.semantic_compressor, EfficientNetCompressor)
    return DecoderParts(
        **_shared_parts(stage),
        latent_scale=PUBLISHED_LATENT_SCALE if published else stage.semantic_compressor.stride / stage.stage_a.stride,
        vqgan=stage.stage_a.module if isinstance(stage.stage_a, VQGAN) else None,
    )


def _shared_parts(stage: StageB | StageC) -> dict[str, Any]:
    stage.complete()
    encoder = stage.text_encoder
    return {
        "network_config": network_config(stage.network),
        "text_encoder": encoder.module,
        "tokenizer": encoder.tokenizer,
        "max_tokens": encoder.max_tokens,
    }


def resolution_multiple(stage: StageC) -> float:
    """Return the pixels of the finished image for each of Stage C's latent positions: the compression."""
    compressor = stage.semantic_compressor
    return PUBLISHED_RESOLUTION_MULTIPLE if isinstance(compressor, EfficientNetCompressor) else float(compressor.stride)


def save_prior(state: Mapping[str, Tensor], parts: PriorParts, directory: Path) -> Exported:
    """Write a folder that `StableCascadePriorPipeline.from_pretrained` loads, replacing `directory` at once.

    The pipeline's scheduler is the cosine schedule with epsilon prediction; a network trained for another objective
    loads, but that scheduler does not fit it. `state` is the network's whole state dict with diffusers' keys, on the
    host, in the dtype to be written.

    Raises:
        RunError: what was read back differs; `directory` is as it was.
    """
    network = build_plain_network(parts.network_config, state)
    with replaced_directory(directory) as partial, quiet():
        _prior_pipeline(network, parts).save_pretrained(partial)
        return Exported(path=directory, max_error=_folder_error(network, partial / "prior", directory))


def save_decoder(state: Mapping[str, Tensor], parts: DecoderParts, directory: Path) -> Exported:
    """Write a folder that `StableCascadeDecoderPipeline.from_pretrained` loads; otherwise as `save_prior`.

    Without Stage A, the folder holds the network alone, in `decoder/`.
    """
    network = build_plain_network(parts.network_config, state)
    with replaced_directory(directory) as partial, quiet():
        if parts.vqgan is None:
            network.save_pretrained(partial / "decoder")
        else:
            _decoder_pipeline(network, parts, parts.vqgan).save_pretrained(partial)
            _name_module(partial / "model_index.json", parts.vqgan)
        return Exported(path=directory, max_error=_folder_error(network, partial / "decoder", directory))


def save_combined(
    prior_state: Mapping[str, Tensor],
    prior: PriorParts,
    decoder_state: Mapping[str, Tensor],
    decoder: DecoderParts,
    directory: Path,
) -> Exported:
    """Write a folder that `StableCascadeCombinedPipeline.from_pretrained` loads; otherwise as `save_prior`.

    That pipeline knows one compression, of 42.67 pixels for each of Stage C's latent positions, whatever the stages
    were trained with.
    """
    if decoder.vqgan is None:
        raise AssertionError("a Stage A that no pipeline has is refused before")
    first = build_plain_network(prior.network_config, prior_state)
    second = build_plain_network(decoder.network_config, decoder_state)
    with replaced_directory(directory) as partial, quiet():
        of_prior = {f"prior_{name}": part for name, part in _prior_pipeline(first, prior).components.items()}
        of_decoder = _decoder_pipeline(second, decoder, decoder.vqgan).components
        StableCascadeCombinedPipeline(**of_decoder, **of_prior).save_pretrained(partial)
        _name_module(partial / "model_index.json", decoder.vqgan)
        written = ((first, partial / "prior_prior"), (second, partial / "decoder"))
        return Exported(path=directory, max_error=max(_folder_error(*each, directory) for each in written))


def _folder_error(network: StableCascadeUNet, written: Path, directory: Path) -> float:
    loaded = StableCascadeUNet.from_pretrained(written, torch_dtype=network.dtype)
    return read_back_error(network, loaded, directory)


def _prior_pipeline(network: StableCascadeUNet, parts: PriorParts) -> StableCascadePriorPipeline:
    return StableCascadePriorPipeline(
        tokenizer=_tokenizer_of_length(parts),
        text_encoder=_copy_on_host(parts.text_encoder, network.dtype),
        prior=network,
        scheduler=DDPMWuerstchenScheduler(),
        resolution_multiple=parts.resolution_multiple,
        image_encoder=None if parts.image_encoder is None else _copy_on_host(parts.image_encoder, network.dtype),
        feature_extractor=_image_processor(parts.image_encoder),
    )


def _decoder_pipeline(
    network: StableCascadeUNet, parts: DecoderParts, vqgan: nn.Module
) -> StableCascadeDecoderPipeline:
    return StableCascadeDecoderPipeline(
        decoder=network,
        tokenizer=_tokenizer_of_length(parts),
        text_encoder=_copy_on_host(parts.text_encoder, network.dtype),
        scheduler=DDPMWuerstchenScheduler(),
        vqgan=_vqgan_on_host(vqgan, network.dtype),
        latent_dim_scale=parts.latent_scale,
    )


def _copy_on_host(tower: Any, dtype: torch.dtype) -> Any:
    """Return a CLIP tower of the network's dtype on the host: the pipeline feeds the network what the towers give."""
    with torch.device("meta"):
        copied = type(tower)(tower.config)
    state = {name: value.to(device="cpu", dtype=dtype) for name, value in tower.state_dict().items()}
    copied.load_state_dict(state, strict=True, assign=True)
    return copied.eval()


def _vqgan_on_host(vqgan: Any, dtype: torch.dtype) -> Any:
    copied = type(vqgan)(**{key: value for key, value in vqgan.config.items() if not key.startswith("_")})
    copied.load_state_dict(vqgan.state_dict(), strict=True)
    return nn.Module.to(copied, dtype=dtype).eval()


def _tokenizer_of_length(parts: PipelineParts) -> Any:
    """Return a copy of the tokenizer that pads to `max_tokens`: the pipeline knows no other place for that length."""
    copied = copy.deepcopy(parts.tokenizer)
    copied.model_max_length = parts.max_tokens
    return copied


def _image_processor(image_encoder: nn.Module | None) -> CLIPImageProcessor | None:
    if image_encoder is None:
        return None
    side = image_encoder.config.image_size
    return CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})


def _name_module(index: Path, vqgan: nn.Module) -> None:
    """Write where Stage A's class lies: diffusers writes its own top level, where it does not find the class again."""
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"vqgan": [type(vqgan).__module__, type(vqgan).__name__]}, indent=2) + "\n")
