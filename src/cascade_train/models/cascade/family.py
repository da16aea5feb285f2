"""Stable Cascade as a family: names of its exports, and what loads them."""

from __future__ import annotations

from cascade_train.models.family import Family

USES = {
    "prior": "`prior/` is Stage C as a pipeline: `StableCascadePriorPipeline.from_pretrained('prior')` of diffusers.",
    "prior.original.safetensors": "`prior.original.safetensors` is Stage C for the original code and for ComfyUI, as a "
    "diffusion model.",
    "decoder": "`decoder/` is Stage B as a pipeline: `StableCascadeDecoderPipeline.from_pretrained('decoder')` of "
    "diffusers, or with a Stage A that it does not know the network alone.",
    "decoder.original.safetensors": "`decoder.original.safetensors` is Stage B for the original code and for ComfyUI.",
    "combined": "`combined/` is the whole cascade: `StableCascadeCombinedPipeline.from_pretrained('combined')` of "
    "diffusers.",
    "lora": "`lora/` is a LoRA of Stage C: `PeftModel.from_pretrained(network, 'lora')` of peft, on diffusers' "
    "`StableCascadeUNet` of the base. New tokens and adapters of the text encoder lie in files of their own beside "
    "it.",
    "lora.safetensors": "`lora.safetensors` is a LoRA of Stage C with its tokens in one file, for cascade_train.",
    "lora.comfyui.safetensors": "`lora.comfyui.safetensors` is a LoRA of Stage C for ComfyUI: put it into "
    "`models/loras`, and its tokens, if there are any, from `lora.comfyui.embeddings/` into `models/embeddings`.",
    "lora.kohya.safetensors": "`lora.kohya.safetensors` is a LoRA of Stage C for sd-scripts and ComfyUI.",
    "lora.original.safetensors": "`lora.original.safetensors` is a LoRA of Stage C for the original code.",
    "controlnet": "`controlnet/controlnet.safetensors` is a control network of Stage C, in the original's layout.",
    "vqgan": "`vqgan/` is Stage A: `PaellaVQModel.from_pretrained('vqgan')` of diffusers.",
    "stage_a": "`stage_a/stage_a.safetensors` is Stage A for the original code and for ComfyUI, as a VAE.",
    "semantic_compressor": "`semantic_compressor/` is a semantic compressor, for cascade_train.",
    "previewer": "`previewer/` is a previewer of Stage C's latents, for cascade_train.",
}
"""What an export is and what loads it, by its name."""


class Cascade(Family):
    """Stable Cascade: Stage A, B and C."""

    tag = "stable-cascade"
    uses = USES
    in_diffusers = frozenset({"prior", "decoder", "combined", "vqgan"})


CASCADE = Cascade()
"""What its stages name."""
