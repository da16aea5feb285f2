"""The family: what its exports are called, and how they are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cascade_train.models.family import Draw, Family


class RectifiedFlow(Family):
    """Rectified-flow transformers."""

    tag = "rectified-flow"
    parts = ("transformer",)
    uses = {
        "pipeline": "`pipeline/` is the model: `StableDiffusion3Pipeline.from_pretrained('pipeline')` of diffusers.",
        "lora": "`lora/` is a LoRA: `pipeline.load_lora_weights('lora')` of diffusers.",
    }
    in_diffusers = frozenset({"pipeline", "lora"})
    lora_root = "transformer"

    def network_class(self) -> Any:
        from diffusers import SD3Transformer2DModel

        return SD3Transformer2DModel

    def probe(self, config: Any, draw: Draw) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        side = 2 * config.patch_size
        latent, text = draw(1, config.in_channels, side, side), draw(1, 5, config.joint_attention_dim)
        return (latent, text, draw(1, config.pooled_projection_dim), torch.tensor([500.0])), {}


RECTIFIED_FLOW = RectifiedFlow()
