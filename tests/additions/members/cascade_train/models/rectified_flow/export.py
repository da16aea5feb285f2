"""The pipeline out, as a folder that diffusers loads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cascade_train.models.rectified_flow.family import RECTIFIED_FLOW
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor

from cascade_train.models.formats.export import (
    build_plain_network,
    copy_on_host,
    fixed_prediction,
    on_host,
    quiet,
    read_back_error,
    replaced_directory,
)
from cascade_train.models.text_encoder import tokenizer_of_length


def save_pipeline(stage: Any, state: Mapping[str, Tensor], directory: Path) -> float:
    """Write the whole model, and compare its network after reading it back."""
    stage.complete()
    network = build_plain_network(RECTIFIED_FLOW, stage.network.config, state)
    vae = AutoencoderKL(**stage.vae.arguments)
    vae.load_state_dict(on_host(stage.vae.module, network.dtype), strict=True, assign=True)
    scheduler = {name: value for name, value in stage.scheduler.items() if name != "_class_name"}
    parts = {"transformer": network, "vae": vae.eval(), "scheduler": FlowMatchEulerDiscreteScheduler(**scheduler)}
    for ending in ("", "_2", "_3"):
        encoder = getattr(stage, f"text_encoder{ending}")
        parts |= {f"text_encoder{ending}": copy_on_host(encoder.module, network.dtype)}
        parts |= {f"tokenizer{ending}": tokenizer_of_length(encoder)}
    with replaced_directory(directory) as place, quiet():
        StableDiffusion3Pipeline(**parts).save_pretrained(place)
        loaded = SD3Transformer2DModel.from_pretrained(place / "transformer", torch_dtype=network.dtype)
        return read_back_error(network, loaded, directory, partial(fixed_prediction, RECTIFIED_FLOW))
