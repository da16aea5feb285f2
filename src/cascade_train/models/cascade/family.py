"""Stable Cascade as a family: names of its exports and tensors, diffusers' and the original's, and what loads them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from cascade_train.files.package import without_siblings
from cascade_train.models.cascade.formats.lora_file_original import is_original, read_original, write_original
from cascade_train.models.family import Draw, Family, NameLayout, Shape, Spelling, Stored
from cascade_train.models.lora import StoredLora

USES = {
    "prior": "`prior/` is Stage C as a pipeline: `StableCascadePriorPipeline.from_pretrained('prior')` of diffusers, "
    "or where that does not sample as the objective does the network alone.",
    "prior.original.safetensors": "`prior.original.safetensors` is Stage C for the original code and for ComfyUI, as a "
    "diffusion model.",
    "decoder": "`decoder/` is Stage B as a pipeline: `StableCascadeDecoderPipeline.from_pretrained('decoder')` of "
    "diffusers, or with a Stage A or an objective that it does not know the network alone.",
    "decoder.original.safetensors": "`decoder.original.safetensors` is Stage B for the original code and for ComfyUI.",
    "lora": "`lora/` is a LoRA: `PeftModel.from_pretrained(network, 'lora')` of peft, on diffusers' "
    "`StableCascadeUNet` of the base. New tokens and adapters of the text encoder lie in files of their own beside "
    "it.",
    "lora.comfyui.safetensors": "`lora.comfyui.safetensors` is a LoRA for ComfyUI: put it into "
    "`models/loras`, and its tokens, if there are any, from `lora.comfyui.embeddings/` into `models/embeddings`.",
    "lora.kohya.safetensors": "`lora.kohya.safetensors` is a LoRA for sd-scripts, ComfyUI and LyCORIS.",
    "lora.original.safetensors": "`lora.original.safetensors` is a LoRA for the original code.",
    "controlnet": "`controlnet/controlnet.safetensors` is a control network of Stage C, in the original's layout.",
    "vqgan": "`vqgan/` is Stage A: `PaellaVQModel.from_pretrained('vqgan')` of diffusers.",
    "stage_a": "`stage_a/stage_a.safetensors` is Stage A for the original code and for ComfyUI, as a VAE.",
    "semantic_compressor": "`semantic_compressor/` is a semantic compressor, for cascade_train.",
    "previewer": "`previewer/` is a previewer of Stage C's latents, for cascade_train.",
}
"""What an export is and what loads it, by its name."""

_OF_COMFYUI, _OF_KOHYA = ("lora_prior_unet_", "lora_prior_te_"), ("lora_unet_", "lora_te_")
"""Prefixes of the network's and the text encoder's modules."""


class Cascade(Family):
    """Stable Cascade: Stage A, B and C."""

    tag = "stable-cascade"
    parts = ("prior", "decoder")
    uses = USES
    in_diffusers = frozenset({"prior", "decoder", "vqgan"})
    sizes = MappingProxyType(
        {"c_3b": "Stage C 3.6B", "c_1b": "Stage C 1B", "b_3b": "Stage B 3B", "b_700m": "Stage B 700M"}
    )
    lora_formats = ("peft", "comfyui", "kohya", "original")

    def network_class(self) -> Any:
        """Return diffusers' `StableCascadeUNet`."""
        with without_siblings("diffusers.models.unets"):  # heavy
            from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet

        return StableCascadeUNet

    def probe(self, config: Any, draw: Draw) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return a latent of the smallest size that every level can halve, 4 x 4 of Stage C, and its conditions."""
        is_stage_c = config.clip_text_in_channels is not None
        side = 4 if is_stage_c else config.patch_size * 2 ** (len(config.block_out_channels) - 1)
        latent = draw(1, config.in_channels, side, side)
        conditions = {"clip_text_pooled": draw(1, 1, config.clip_text_pooled_in_channels)}
        if is_stage_c:
            conditions["clip_text"] = draw(1, 5, config.clip_text_in_channels)
            conditions["clip_img"] = draw(1, 1, config.clip_image_in_channels)
        else:
            conditions["effnet"] = draw(1, config.effnet_in_channels, 2, 2)
        return (latent, torch.full((1,), 0.5, dtype=latent.dtype)), conditions

    def layout(self, config: Mapping[str, Any]) -> NameLayout:
        """Return the layout of diffusers' names or the original's."""
        return map_keys

    def part_of(self, config: Mapping[str, Any]) -> str:
        """Return `prior` for Stage C, `decoder` for Stage B."""
        return self.parts[config["clip_text_in_channels"] is None]

    def original_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a network's tensors under the original's names."""
        return original_state(state)

    def size_of(self, shapes: Mapping[str, Shape]) -> str | None:
        """Return the published size that has these tensors.

        Sizes of Stage C differ in the rows of `clip_txt_mapper`, those of Stage B in the width of level 1
        (diffusers, loaders/single_file_utils.py).
        """
        text, width = (shapes.get(f"{n}.weight") for n in ("clip_txt_mapper", "down_blocks.1.0.channelwise.0"))
        if text is not None:
            return {2048: "c_3b", 1536: "c_1b"}.get(text[0])
        return None if width is None else {640: "b_3b", 576: "b_700m"}.get(width[-1])

    def adapter_size(self, shapes: Iterable[Shape]) -> tuple[str | None, int]:
        """Return the published size whose widths stored adapters have, and the width that tells it.

        The widest level of Stage C is 2048 or 1536 wide, that of Stage B 1152 or 1280.
        """
        widths = {width for shape in shapes for width in shape[:2]}
        sizes = {2048: "c_3b", 1536: "c_1b", 1152: "b_700m", 1280: "b_3b"}
        return next(((size, width) for width, size in sizes.items() if width in widths), (None, 0))

    def model_spec(self, config: Mapping[str, Any], *, is_lora: bool, prediction: str | None) -> dict[str, str]:
        """Return the architecture by its stage, of 1024 pixels."""
        stage = {"prior": "c", "decoder": "b"}[self.part_of(config)]
        return {
            "modelspec.architecture": f"stable-cascade-v1-stage-{stage}",
            "modelspec.implementation": "https://github.com/Stability-AI/StableCascade",
            "modelspec.resolution": "1024x1024",
        }

    def spelling(self, format: str, modules: Sequence[str]) -> Spelling:
        """Return the names of ComfyUI (comfy/lora.py) or of kohya's branch for the cascade (networks/lora.py)."""
        own = "clip_txt_mapper" in modules and format == "comfyui"  # which maps other prefixes for Stage C alone
        return Spelling(*(_OF_COMFYUI if own else _OF_KOHYA), foreign_names(modules))

    def spellings(self, modules: Sequence[str]) -> list[Spelling]:
        """Return the names of ComfyUI and kohya."""
        return [Spelling(*prefixes, foreign_names(modules)) for prefixes in (_OF_COMFYUI, _OF_KOHYA)]

    def read_numbered_lora(
        self,
        header: Mapping[str, str],
        tensors: Mapping[str, Tensor],
        modules: Mapping[str, Shape],
        filters: Sequence[str] | None,
        origin: str,
    ) -> StoredLora | None:
        """Read the original's layout."""
        return read_original(header, tensors, modules, filters, origin) if is_original(tensors) else None

    def write_numbered_lora(
        self, path: Path, lora: StoredLora, modules: Mapping[str, Shape], header: Mapping[str, str]
    ) -> None:
        """Write the original's layout."""
        write_original(path, lora, modules, header)


_FUSED = {"attn.in_proj_weight": "weight", "attn.in_proj_bias": "bias"}


def map_keys(stored_names: Iterable[str]) -> dict[str, Stored]:
    """Lay out a denoising network that is stored under diffusers' names or the original's.

    The original fuses q, k and v in `in_proj` and calls Stage B's pooled text mapper `clip_mapper`
    (Stable Cascade, modules/common.py and modules/stage_b.py).
    """
    mapped: dict[str, Stored] = {}
    for name in stored_names:
        fused = next((old for old in _FUSED if name.endswith(old)), None)
        if fused is None:
            ours = re.sub(r"^clip_mapper\.", "clip_txt_pooled_mapper.", name)
            mapped[ours.replace("attn.out_proj.", "to_out.0.")] = Stored(name)
            continue
        stem = name.removesuffix(fused)
        for third, projection in enumerate(("to_q", "to_k", "to_v")):
            mapped[f"{stem}{projection}.{_FUSED[fused]}"] = Stored(name, third)
    return mapped


def foreign_names(names: Iterable[str]) -> dict[str, str]:
    """Return what the original calls the modules or tensors of a network, q, k and v apart, as adapters name them."""
    names = list(names)
    is_stage_b = not any(name.startswith("clip_txt_mapper") for name in names)
    found = {}
    for name in names:
        there = name.replace(".attention.to_", ".attention.attn.to_").replace(".attn.to_out.0", ".attn.out_proj")
        found[name] = re.sub("^clip_txt_pooled_mapper", "clip_mapper", there) if is_stage_b else there
    return found


def original_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a network's tensors under the original's names, q, k and v in one; the others share memory.

    The inverse of `map_keys`; in the original's order except for the mappers of the conditions.
    """
    found: dict[str, Tensor] = {}
    for name, there in foreign_names(state).items():
        stem, _, leaf = there.partition("attn.to_q.")
        if leaf:
            found[f"{stem}attn.in_proj_{leaf}"] = torch.cat([state[name.replace("to_q", f"to_{p}")] for p in "qkv"])
        elif ".attn.to_" not in there:
            found[there] = state[name].contiguous()
    return found


CASCADE = Cascade()
"""What its stages name."""
