"""Stable Diffusion as a family: names of its exports and pipelines, and what loads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from cascade_train.models.family import Draw, Family, NameLayout, Spelling
from cascade_train.models.stable_diffusion.formats import original_names, single_file

USES = {
    "lora": "`lora/` is a LoRA of Stable Diffusion: `pipeline.load_lora_weights('lora')` of diffusers, with the base's "
    "pipeline. New tokens lie in `lora/embeddings/`, for `pipeline.load_textual_inversion`.",
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
    parts = ("unet",)
    uses = USES
    in_diffusers = frozenset({"lora", "controlnet", "pipeline", "unet", "vae"})
    pipelines = MappingProxyType({"StableDiffusionPipeline": "sd15", "StableDiffusionXLPipeline": "sdxl"})

    lora_root = "unet"
    lora_formats = ("peft", "kohya")

    def network_class(self) -> Any:
        """Return diffusers' `UNet2DConditionModel`."""
        from diffusers import UNet2DConditionModel  # heavy

        return UNet2DConditionModel

    def probe(self, config: Any, draw: Draw) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return a latent of the smallest size that every level can halve, and its conditions."""
        side, text = 2 ** (len(config.block_out_channels) - 1), draw(1, 5, config.cross_attention_dim)
        added = {}
        if config.addition_embed_type is not None:
            pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
            added = {"added_cond_kwargs": {"text_embeds": draw(1, pooled), "time_ids": draw(1, 6)}}
        return (draw(1, config.in_channels, side, side), torch.tensor([500]), text), added

    def layout(self, config: Mapping[str, Any]) -> NameLayout:
        """Return the layout of diffusers' names, or of the network in a file of a whole model."""
        return single_file.unet_layout(config)

    def spelling(self, format: str, modules: Sequence[str]) -> Spelling:
        """Return kohya's names: diffusers' of 1.x and 2.x, of XL the original's and `lora_te1_` for the first tower."""
        return self.spellings(modules)["add_embedding.linear_1" in modules]

    def spellings(self, modules: Sequence[str]) -> list[Spelling]:
        """Return kohya's names, diffusers' and the original's."""
        originals = original_names.unet_modules(modules)
        plain = Spelling("lora_unet_", "lora_te_", {name: name for name in modules})
        return [plain, Spelling("lora_unet_", "lora_te1_", originals)]

    def read_text_tower(self, source: str, module: nn.Module, *, part: str) -> dict[str, Tensor]:
        """Return the tensors of a text tower in a file of a whole model, see `Family.read_text_tower`."""
        return single_file.read_text_tower(source, module, part=part)

    def model_spec(self, config: Mapping[str, Any], *, is_lora: bool, prediction: str | None) -> dict[str, str]:
        """Return architecture, resolution, prediction and kohya's version, as sd-scripts writes them."""
        return original_names.of_unet(config, is_lora=is_lora, prediction=prediction)

    def save_single_file(self, folder: Path, out: Path, *, dtype: torch.dtype | None, title: str) -> float:
        """Write a pipeline's folder as one file under the original code's names, see `Family.save_single_file`."""
        return single_file.save_single_file(folder, out, dtype=dtype, title=title)


STABLE_DIFFUSION = StableDiffusionFamily()
"""What its stages name."""
