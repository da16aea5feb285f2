"""Stage B's weights out: a folder that diffusers' decoder pipeline loads, read back and compared before it counts.

Takes plain state dicts, gathered from their shards by the caller, on one process. Must not live here: Stage C's folder
and what both share (formats/export.py), single files (formats/export_formats.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import DDPMWuerstchenScheduler, StableCascadeDecoderPipeline, StableCascadeUNet
from torch import Tensor, nn

from cascade_train.models.formats.export import (
    Exported,
    build_plain_network,
    copy_on_host,
    network_config,
    quiet,
    read_back_error,
    replaced_directory,
    tokenizer_of_length,
)
from cascade_train.models.latent_codec import VQGAN
from cascade_train.models.semantic_compressor import EfficientNetCompressor
from cascade_train.models.stage_b import StageB

PUBLISHED_LATENT_SCALE = 10.67
"""Positions of Stage A's latents for each semantic one where Stage B decodes 24 x 24 to 1024 x 1024 pixels."""


@dataclass(frozen=True, kw_only=True)
class DecoderParts:
    """What a decoder pipeline consists of, beside the weights of its network.

    Attributes:
        network_config: the network's diffusers config.
        text_encoder: the frozen `CLIPTextModelWithProjection`.
        tokenizer: its `CLIPTokenizer`.
        max_tokens: length to which captions are cut and padded.
        latent_scale: positions of Stage A's latents for each semantic one.
        vqgan: Stage A, a `PaellaVQModel`; None = a Stage A that no pipeline of diffusers has: only the network is
            written.
    """

    network_config: Mapping[str, Any]
    text_encoder: nn.Module
    tokenizer: Any
    max_tokens: int
    latent_scale: float
    vqgan: nn.Module | None


def decoder_parts(stage: StageB) -> DecoderParts:
    """Return what a built Stage B gives to a decoder pipeline; builds what a cache had made needless."""
    stage.complete()
    published = isinstance(stage.semantic_compressor, EfficientNetCompressor)
    return DecoderParts(
        network_config=network_config(stage.network),
        text_encoder=stage.text_encoder.module,
        tokenizer=stage.text_encoder.tokenizer,
        max_tokens=stage.text_encoder.max_tokens,
        latent_scale=PUBLISHED_LATENT_SCALE if published else stage.semantic_compressor.stride / stage.stage_a.stride,
        vqgan=stage.stage_a.module if isinstance(stage.stage_a, VQGAN) else None,
    )


def save_decoder(state: Mapping[str, Tensor], parts: DecoderParts, directory: Path) -> Exported:
    """Write a folder that `StableCascadeDecoderPipeline.from_pretrained` loads, replacing `directory` at once.

    Its scheduler is the cosine schedule with epsilon prediction, as that of `save_prior`.

    Args:
        state: the network's whole state dict with diffusers' keys, on the host, in the dtype to be written.
        parts: the rest of the pipeline; without Stage A, the folder holds the network alone, in `decoder/`.
        directory: appears when all is written and verified.

    Raises:
        RunError: what was read back differs; `directory` is as it was.
    """
    network = build_plain_network(parts.network_config, state)
    with replaced_directory(directory) as partial, quiet():
        if parts.vqgan is None:
            network.save_pretrained(partial / "decoder")
        else:
            decoder_pipeline(network, parts, parts.vqgan).save_pretrained(partial)
            name_its_module(partial / "model_index.json", parts.vqgan)
        error = read_back_error(network, partial / "decoder", directory)
    return Exported(path=directory, max_error=error)


def decoder_pipeline(network: StableCascadeUNet, parts: DecoderParts, vqgan: nn.Module) -> StableCascadeDecoderPipeline:
    """Return the pipeline around a network and a Stage A, copied to the host in the network's dtype."""
    return StableCascadeDecoderPipeline(
        decoder=network,
        tokenizer=tokenizer_of_length(parts.tokenizer, parts.max_tokens),
        text_encoder=copy_on_host(parts.text_encoder, network.dtype),
        scheduler=DDPMWuerstchenScheduler(),
        vqgan=_vqgan_on_host(vqgan, network.dtype),
        latent_dim_scale=parts.latent_scale,
    )


def name_its_module(index: Path, vqgan: nn.Module) -> None:
    """Say where Stage A's class lies: diffusers writes its own top level, where it does not find the class again."""
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"vqgan": [type(vqgan).__module__, type(vqgan).__name__]}, indent=2) + "\n")


def _vqgan_on_host(vqgan: Any, dtype: Any) -> Any:
    copied = type(vqgan)(**{key: value for key, value in vqgan.config.items() if not key.startswith("_")})
    copied.load_state_dict(vqgan.state_dict(), strict=True)
    return nn.Module.to(copied, dtype=dtype).eval()
