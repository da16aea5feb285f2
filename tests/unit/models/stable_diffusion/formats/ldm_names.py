"""The names of Stable Diffusion's single files, from those of diffusers, as the original code has them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
OUTER = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
}  # fmt: skip
CLIP = {
    "layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}  # fmt: skip


def unet_name(name: str, layers: int) -> str:
    """Return the original's name of a tensor of a UNet with this `layers_per_block`."""
    stem, leaf = name.rsplit(".", 1)
    if stem in OUTER:
        return f"model.diffusion_model.{OUTER[stem]}.{leaf}"
    place, kind, number, rest = re.fullmatch(r"((?:down|up)_blocks\.\d+|mid_block)\.(\w+)\.(\d+)\.(.*)", name).groups()
    level, index = int(place.rpartition(".")[2]) if "." in place else 0, int(number)
    if kind == "resnets":
        first, _, last = rest.partition(".")
        rest = f"{RESNET[first]}.{last}"
    slot = {"resnets": 0, "attentions": 1}.get(kind)
    if place == "mid_block":
        return f"model.diffusion_model.middle_block.{2 * index if kind == 'resnets' else 1}.{rest}"
    if place.startswith("down"):
        if kind == "downsamplers":
            return f"model.diffusion_model.input_blocks.{1 + level * (layers + 1) + layers}.0.op.{leaf}"
        return f"model.diffusion_model.input_blocks.{1 + level * (layers + 1) + index}.{slot}.{rest}"
    if kind == "upsamplers":
        return f"model.diffusion_model.output_blocks.{level * (layers + 1) + layers}.2.conv.{leaf}"
    return f"model.diffusion_model.output_blocks.{level * (layers + 1) + index}.{slot}.{rest}"


def vae_tensors(state: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Return an autoencoder's tensors as the original stores them."""
    found = {}
    for name, tensor in state.items():
        new = re.sub(r"up_blocks\.(\d+)", lambda m: f"up.{levels - 1 - int(m[1])}", name)
        new = re.sub(r"down_blocks\.(\d+)", r"down.\1", new).replace("mid_block.attentions.0", "mid.attn_1")
        new = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", new).replace(
            "resnets", "block"
        )
        for theirs, ours in (
            ("samplers.0", "sample"),
            ("conv_shortcut", "nin_shortcut"),
            ("conv_norm_out", "norm_out"),
        ):
            new = new.replace(theirs, ours)
        for part in ("q", "k", "v"):
            new = new.replace(f"to_{part}.", f"{part}.")
        new = new.replace("to_out.0.", "proj_out.").replace("group_norm", "norm")
        is_attention = "attn_1" in new and "norm" not in new and tensor.ndim == 2
        found[f"first_stage_model.{new}"] = tensor[:, :, None, None] if is_attention else tensor
    return found


def clip_tensors(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return a text tower's tensors as CLIP's own code names them, below a prefix."""
    return {f"{prefix}text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in state.items()}


def open_clip_tensors(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return a text tower's tensors as OpenCLIP stores them, q, k and v in one."""
    plain = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    found = {
        "positional_embedding": plain["embeddings.position_embedding.weight"],
        "token_embedding.weight": plain["embeddings.token_embedding.weight"],
        "ln_final.weight": plain["final_layer_norm.weight"],
        "ln_final.bias": plain["final_layer_norm.bias"],
        "text_projection": plain["text_projection.weight"].T.contiguous(),
    }
    for name, tensor in plain.items():
        if (match := re.fullmatch(r"encoder\.layers\.(\d+)\.(.*)\.(weight|bias)", name)) is None:
            continue
        block, inner, leaf = f"transformer.resblocks.{match[1]}", match[2], match[3]
        if inner == "self_attn.q_proj":
            stem = name.removesuffix(f"q_proj.{leaf}")
            found[f"{block}.attn.in_proj_{leaf}"] = torch.cat([plain[f"{stem}{p}_proj.{leaf}"] for p in "qkv"])
        elif inner in CLIP:
            found[f"{block}.{CLIP[inner]}.{leaf}"] = tensor
    return {f"{prefix}{name}": tensor for name, tensor in found.items()}
