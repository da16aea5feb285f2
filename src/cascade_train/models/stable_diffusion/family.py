"""Stable Diffusion as a family: names of its exports and pipelines, and what loads them."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from cascade_train.models.family import Family

USES = {
    "lora": "`lora/` is a LoRA of Stable Diffusion: `pipeline.load_lora_weights('lora')` of diffusers, with the base's "
    "pipeline. New tokens lie in `lora/embeddings/`, for `pipeline.load_textual_inversion`.",
    "lora.safetensors": "`lora.safetensors` is a LoRA of Stable Diffusion in one file, for cascade_train.",
    "lora.kohya.safetensors": "`lora.kohya.safetensors` is a LoRA of Stable Diffusion for sd-scripts, ComfyUI and "
    "others.",
    "controlnet": "`controlnet/` is a control network: `ControlNetModel.from_pretrained('controlnet')` of diffusers.",
    "pipeline": "`pipeline/` is the whole model: `DiffusionPipeline.from_pretrained('pipeline')` of diffusers.",
    "unet": "`unet/` is a network of Stable Diffusion: `UNet2DConditionModel.from_pretrained('unet')` of diffusers.",
    "pipeline.safetensors": "`pipeline.safetensors` is the whole model in one file: `from_single_file` of diffusers' "
    "pipelines, and a checkpoint for ComfyUI.",
    "vae": "`vae/` is an autoencoder of Stable Diffusion: `AutoencoderKL.from_pretrained('vae')` of diffusers.",
}
"""What an export is and what loads it, by its name."""


class StableDiffusionFamily(Family):
    """Stable Diffusion 1.x, 2.x and XL, and their autoencoders."""

    tag = "stable-diffusion"
    uses = USES
    in_diffusers = frozenset({"lora", "controlnet", "pipeline", "unet", "vae"})
    pipelines = MappingProxyType({"StableDiffusionPipeline": "sd15", "StableDiffusionXLPipeline": "sdxl"})

    def stored_pipeline(self, folder: Path, model: str) -> tuple[list[str], dict[str, Any]]:
        """Return how a training of a pipeline's folder is composed, see `stored_pipeline`."""
        from cascade_train.models.stable_diffusion.formats.stored_pipeline import stored_pipeline  # heavy: diffusers

        return stored_pipeline(folder, model)

    def save_single_file(self, folder: Path, out: Path, *, dtype: torch.dtype | None) -> float:
        """Write a pipeline's folder as one file under the original code's names, see `Family.save_single_file`."""
        from cascade_train.models.stable_diffusion.formats.export_single_file import save_single_file  # heavy

        return save_single_file(folder, out, dtype=dtype)


STABLE_DIFFUSION = StableDiffusionFamily()
"""What its stages name."""
