"""What headers say of a UNet of Stable Diffusion, as sd-scripts names it (library/sai_model_spec.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GENERATIVE_MODELS = "https://github.com/Stability-AI/generative-models"
_SD2_WIDTH = 1024
_STRIDE = 8
_V_SIDE = 96
"""Latent side of the Stable Diffusion 2 that predicts velocity."""


def of_unet(config: Mapping[str, Any], *, is_lora: bool, prediction: str | None) -> dict[str, str]:
    """Return architecture, resolution, prediction and kohya's version of a UNet of this diffusers config.

    `prediction` is "epsilon" or "v_prediction"; None = that of the published model of this size.
    """
    is_xl = config.get("addition_embed_type") is not None
    is_v2 = not is_xl and config["cross_attention_dim"] == _SD2_WIDTH
    published_v = is_v2 and config["sample_size"] == _V_SIDE
    is_v = prediction == "v_prediction" or (prediction is None and published_v)
    of_v2 = "stable-diffusion-v2-768-v" if is_v else "stable-diffusion-v2-512"
    side = _STRIDE * config["sample_size"]
    architecture = "stable-diffusion-xl-v1-base" if is_xl else of_v2 if is_v2 else "stable-diffusion-v1"
    return {
        "modelspec.architecture": architecture,
        "modelspec.implementation": "diffusers" if is_lora and not is_xl else _GENERATIVE_MODELS,
        "modelspec.resolution": f"{side}x{side}",
        "modelspec.prediction_type": "v" if is_v else "epsilon",
        "ss_base_model_version": "sdxl_base_v1-0" if is_xl else f"sd_v{2 if is_v2 else 1}{'_v' if is_v else ''}",
    }
