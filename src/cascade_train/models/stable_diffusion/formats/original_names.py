"""The original's names of Stable Diffusion's modules and tensors, from diffusers' (ldm and sgm, their openaimodel.py).

Lives here: names alone, of UNet, autoencoder and text towers, and of models in headers. Must not live here: files
(single_file.py) and adapters (lora_files_keyed.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from cascade_train.models.formats.weights import replace_parts

_OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_RESIDUAL = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_BLOCK = re.compile(r"(?:(down|up)_blocks\.(\d+)|mid_block)\.(\w+)\.(\d+)\.?(.*)")
_LAYER = re.compile(r"down_blocks\.0\.resnets\.(\d+)\.")
_VAE = (
    ("mid_block.attentions.0.", "mid.attn_1."),
    ("mid_block.resnets.0.", "mid.block_1."),
    ("mid_block.resnets.1.", "mid.block_2."),
    ("down_blocks.", "down."),
    (".resnets.", ".block."),
    ("samplers.0.", "sample."),
    ("conv_shortcut.", "nin_shortcut."),
    ("conv_norm_out.", "norm_out."),
    (".group_norm.", ".norm."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    (".to_out.0.", ".proj_out."),
)
"""Parts of an autoencoder's names, in the order in which they are replaced; levels of the way up are counted anew."""

_OPEN_CLIP = (
    ("encoder.layers.", "transformer.resblocks."),
    ("layer_norm1", "ln_1"),
    ("layer_norm2", "ln_2"),
    ("mlp.fc1", "mlp.c_fc"),
    ("mlp.fc2", "mlp.c_proj"),
    ("self_attn", "attn"),
    ("final_layer_norm", "ln_final"),
    ("embeddings.token_embedding", "token_embedding"),
    ("embeddings.position_embedding.weight", "positional_embedding"),
)

_GENERATIVE_MODELS = "https://github.com/Stability-AI/generative-models"
_NAMED = ("epsilon", "v_prediction")
"""Predictions that ModelSpec knows."""

_SD2_WIDTH = 1024
_STRIDE = 8
_V_SIDE = 96
"""Latent side of the Stable Diffusion 2 that predicts velocity."""


def unet_modules(modules: Iterable[str]) -> dict[str, str]:
    """Return the original's dotted names of all modules of a UNet, by diffusers' names.

    `modules` are all of the network that have parameters: residual blocks of a level and attention in it are counted.
    """
    names = list(modules)
    layers = 1 + max((int(match[1]) for name in names if (match := _LAYER.match(name))), default=0)
    attends = {name.partition(".attentions.")[0] for name in names if ".attentions." in name}
    return {name: _unet_module(name, layers, attends) for name in names}


def _unet_module(name: str, layers: int, attends: set[str]) -> str:
    match = _BLOCK.fullmatch(name)
    if match is None:
        return _OUTER[name]
    way, level, kind, number, rest = match.groups()
    index = int(number)
    if kind == "resnets":
        rest = _RESIDUAL[rest]
    if way is None:
        return f"middle_block.{2 * index if kind == 'resnets' else 1}.{rest}"
    slot = 1 if kind == "attentions" else 0
    if way == "down":
        first = 1 + int(level) * (layers + 1)
        if kind == "downsamplers":
            return f"input_blocks.{first + layers}.0.op"
        return f"input_blocks.{first + index}.{slot}.{rest}"
    first = int(level) * (layers + 1)
    if kind == "upsamplers":
        return f"output_blocks.{first + layers}.{2 if f'up_blocks.{level}' in attends else 1}.{rest}"
    return f"output_blocks.{first + index}.{slot}.{rest}"


def unet_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a UNet's tensors under the original's names, without a beginning; memory is shared."""
    named = unet_modules({name.rpartition(".")[0] for name in state})
    pairs = {name: name.rpartition(".") for name in state}
    return {f"{named[stem]}.{leaf}": state[name] for name, (stem, _, leaf) in pairs.items()}


def vae_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an autoencoder's tensors under the original's names; its attention is made of convolutions there."""
    last = max(int(name.split(".")[2]) for name in state if name.startswith("decoder.up_blocks."))
    found = {}
    for name, tensor in state.items():
        new = re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{last - int(match[1])}", name)
        new = replace_parts(new, _VAE)
        found[new] = tensor[:, :, None, None] if ".attn_1." in new and tensor.ndim == 2 else tensor
    return found


def clip_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a text tower's tensors as CLIP's first releases in transformers name them, which the original uses."""
    return {f"transformer.text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in state.items()}


def open_clip_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a text tower's tensors as OpenCLIP names them: q, k and v in one, the projection transposed."""
    plain = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        stem, _, leaf = name.partition(".q_proj.")
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if leaf:
            fused = torch.cat([plain[f"{stem}.{part}_proj.{leaf}"] for part in "qkv"])
            found[f"{replace_parts(stem, _OPEN_CLIP)}.in_proj_{leaf}"] = fused
        elif name == "text_projection.weight":
            found["text_projection"] = tensor.T
        else:
            found[replace_parts(name, _OPEN_CLIP)] = tensor
    return {f"model.{name}": tensor for name, tensor in found.items()}


def of_unet(config: Mapping[str, Any], *, is_lora: bool, prediction: str | None) -> dict[str, str]:
    """Return the header of a UNet of this diffusers config, as sd-scripts has it (library/sai_model_spec.py).

    `prediction` is "epsilon", "v_prediction" or another, which the header does not name; None = that of the published
    model of this size.
    """
    is_xl = config.get("addition_embed_type") is not None
    is_v2 = not is_xl and config["cross_attention_dim"] == _SD2_WIDTH
    published_v = is_v2 and config["sample_size"] == _V_SIDE
    is_v = prediction == "v_prediction" or (prediction is None and published_v)
    of_v2 = "stable-diffusion-v2-768-v" if is_v else "stable-diffusion-v2-512"
    side = _STRIDE * config["sample_size"]
    architecture = "stable-diffusion-xl-v1-base" if is_xl else of_v2 if is_v2 else "stable-diffusion-v1"
    named = {"modelspec.prediction_type": "v" if is_v else "epsilon"} if prediction in (None, *_NAMED) else {}
    return {
        "modelspec.architecture": architecture,
        "modelspec.implementation": "diffusers" if is_lora and not is_xl else _GENERATIVE_MODELS,
        "modelspec.resolution": f"{side}x{side}",
        "ss_base_model_version": "sdxl_base_v1-0" if is_xl else f"sd_v{2 if is_v2 else 1}{'_v' if is_v else ''}",
        "ss_v2": str(is_v2),
        **named,
    }
