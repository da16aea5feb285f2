"""What headers of exports say of a model: Stability's ModelSpec 1.0.1, and the version by kohya's name.

Must not live here: tensors, and what else a format's header has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cascade_train.models.formats.weights_tensors import is_condition_unet

_GENERATIVE_MODELS = "https://github.com/Stability-AI/generative-models"
_STABLE_CASCADE = "https://github.com/Stability-AI/StableCascade"
_SD2_WIDTH = 1024
_SD_STRIDE = 8
_V_SIDE = 96
"""Latent side of the Stable Diffusion 2 that predicts velocity."""


def model_spec(
    network_config: Mapping[str, Any], title: str, *, is_lora: bool, prediction: str | None = None
) -> dict[str, str]:
    """Return the entries of a header, for a network of that diffusers config.

    `prediction` is "epsilon" or "v_prediction"; None = that of the published model of this size.
    """
    side, implementation = 1024, _STABLE_CASCADE
    version = {}
    if is_condition_unet(network_config):
        side = _SD_STRIDE * network_config["sample_size"]
        is_xl = network_config.get("addition_embed_type") is not None
        is_v2 = not is_xl and network_config["cross_attention_dim"] == _SD2_WIDTH
        is_v = prediction == "v_prediction" or (
            prediction is None and is_v2 and network_config["sample_size"] == _V_SIDE
        )
        of_v2 = "stable-diffusion-v2-768-v" if is_v else "stable-diffusion-v2-512"
        architecture = "stable-diffusion-xl-v1-base" if is_xl else of_v2 if is_v2 else "stable-diffusion-v1"
        implementation = "diffusers" if is_lora and not is_xl else _GENERATIVE_MODELS
        name = "sdxl_base_v1-0" if is_xl else f"sd_v{2 if is_v2 else 1}{'_v' if is_v else ''}"
        version = {"ss_base_model_version": name, "modelspec.prediction_type": "v" if is_v else "epsilon"}
    else:
        stage = "b" if network_config["clip_text_in_channels"] is None else "c"
        architecture = f"stable-cascade-v1-stage-{stage}"
    return {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{architecture}/lora" if is_lora else architecture,
        "modelspec.implementation": implementation,
        "modelspec.title": title,
        "modelspec.resolution": f"{side}x{side}",
        **version,
    }
