"""Cases of the networks (stage_c_*, stage_b_forward, effnet_encoder, previewer), run on our code.

Weights are stored under the original's names and pass through the same loader as a user's.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bench.parity_case import Comparison, NotCoveredError, Outcome, Variant
from cascade_train.models.cascade.family import map_keys
from cascade_train.models.cascade.networks.unet import CascadeUNet
from cascade_train.models.cascade.previewer import PreviewNetwork
from cascade_train.models.cascade.semantic_compressor import EfficientNetCompressor
from cascade_train.models.cascade.unet_config import BLOCK_TYPES, CascadeUNetConfig
from cascade_train.models.formats.weights import load_module, load_state

CPU = torch.device("cpu")
BLOCKS = dict(zip("CTA", BLOCK_TYPES, strict=True))


def network_config(args: Mapping[str, Any]) -> CascadeUNetConfig:
    """Return the architecture of Stage B or C that a case describes in the original's words.

    Raises:
        NotCoveredError: it has parts that no published model has.
    """
    if any("F" in level for level in args["level_config"]):
        raise NotCoveredError("feed-forward blocks belong to no published model; neither diffusers nor we build them")
    return CascadeUNetConfig(
        in_channels=args["c_in"],
        out_channels=args["c_out"],
        timestep_ratio_embedding_dim=args["c_r"],
        patch_size=args["patch_size"],
        conditioning_dim=args["c_cond"],
        block_out_channels=args["c_hidden"],
        num_attention_heads=[max(heads, 0) for heads in args["nhead"]],
        down_num_layers_per_block=args["blocks"][0],
        up_num_layers_per_block=args["blocks"][1],
        down_blocks_repeat_mappers=args["block_repeat"][0],
        up_blocks_repeat_mappers=args["block_repeat"][1],
        block_types_per_layer=[[BLOCKS[letter] for letter in level] for level in args["level_config"]],
        clip_text_in_channels=args.get("c_clip_text"),
        clip_text_pooled_in_channels=args.get("c_clip_text_pooled", args.get("c_clip")),
        clip_image_in_channels=args.get("c_clip_img"),
        clip_seq=args["c_clip_seq"],
        effnet_in_channels=args.get("c_effnet"),
        pixel_mapper_in_channels=args.get("c_pixels"),
        kernel_size=args["kernel_size"],
        dropout=args["dropout"],
        self_attn=args["self_attn"],
        timestep_conditioning_type=args["t_conds"],
        switch_level=args.get("switch_level"),
    )


def build_network(args: Mapping[str, Any], weights: Mapping[str, Tensor]) -> CascadeUNet:
    """Build such a network in eval mode, its weights loaded as a user's are."""
    network = network_config(args).build()
    with tempfile.TemporaryDirectory() as folder:
        load_state(network, store(weights, Path(folder)), dtype=torch.float32)
    return network.eval()


def store(weights: Mapping[str, Tensor], folder: Path) -> str:
    """Write weights as the original would, and return the file's path."""
    path = folder / "weights.safetensors"
    save_file(dict(weights), path)
    return str(path)


def fetch(network: nn.Module, original: str, of: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
    """Return something of the parameter that the original calls so; its fused projections are three of ours."""
    names = sorted(map_keys([original]).items(), key=lambda item: item[1].third or 0)
    found = [of(network.get_parameter(name)) for name, _ in names]
    return torch.cat([value for value in found if value is not None])


def forward(variant: Variant, *, recompute: bool = False) -> Outcome:
    """Run a network of Stage B or C, its embeddings, and where the case has them the gradients.

    Args:
        variant: of stage_c_forward, stage_c_cnet or stage_b_forward.
        recompute: whether activations are computed again in backward.
    """
    network = build_network(variant.args["ctor"], variant.weights)
    network.gradient_checkpointing = recompute
    given = {name: value.clone() for name, value in variant.inputs.items()}
    wanted = variant.outputs
    for name in wanted:
        if name.startswith("grad.in."):
            given[name.removeprefix("grad.in.")].requires_grad_()
    names = ("clip_text", "clip_img", "effnet", "pixels", "sca", "crp")
    sides = {name: given[name] for name in names if name in given}
    control = {int(name[len("cnet.") :]): value for name, value in given.items() if name.startswith("cnet.")}
    pooled = given["clip_text_pooled"] if "clip_text_pooled" in given else given["clip"]
    pred = network(given["x"], given["r"], pooled, **sides, control=control, return_dict=False)[0]
    got = {
        "y": pred,
        "r_embed": network.get_timestep_ratio_embedding(given["r"]),
        "clip_emb": network.get_clip_embeddings(pooled, sides.get("clip_text"), sides.get("clip_img")),
    }
    if "loss" in wanted:
        got["loss"] = (pred * given["g"]).sum()
        got["loss"].backward()
    got |= {name: _gradient(network, given, name) for name in wanted if name.startswith("grad.")}
    return Outcome({name: value.detach() for name, value in got.items() if name in wanted})


def _gradient(network: CascadeUNet, inputs: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the gradient that the case calls grad.in.<input> or grad.w.<weight>."""
    kind, _, rest = name.removeprefix("grad.").partition(".")
    gradient = inputs[rest].grad if kind == "in" else fetch(network, rest, lambda parameter: parameter.grad)
    if gradient is None:
        raise AssertionError(f"{name}: no gradient arrived")
    return gradient


def previewer(variant: Variant) -> Outcome:
    """Run the previewer."""
    args = variant.args["ctor"]
    with torch.device("meta"):
        network = PreviewNetwork(args["c_in"], args["c_hidden"], args["c_out"])
    with tempfile.TemporaryDirectory() as folder:
        source = store(variant.weights, Path(folder))
        load_module(network, source, dtype=torch.float32, device=CPU, key="model.previewer.weights")
    with torch.no_grad():
        return Outcome({"image": network.eval()(variant.inputs["latent"])})


def compressor(variant: Variant) -> Outcome:
    """Run the EfficientNet encoder, its weights made by the cases' recipe."""
    ours = EfficientNetCompressor(weights=None)
    ours.build(device=CPU)
    module, args, image = ours.module, variant.args, variant.inputs["image"]
    digest = recipe_fill(module, args["recipe_seed"], args["recipe_gain"])
    problem = None if digest == variant.facts["recipe_sha256"] else "the recipe gave other weights"
    with torch.no_grad():
        got = {"backbone": module.backbone(image), "latent": module(image)}
    got["latent_of_preprocessed"] = ours.encode(image)
    return Outcome(got, facts=[Comparison("recipe_sha256", 0.0, 0.0, problem)])


@torch.no_grad()
def recipe_fill(module: nn.Module, seed: int, gain: float) -> str:
    """Fill a module by the cases' bit-exact recipe (splitmix64 of name and position) and return its hash."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if name.endswith("num_batches_tracked"):
            tensor.zero_()
            continue
        values = recipe_values(name, tensor, seed, gain)
        digest.update(values.tobytes())
        tensor.copy_(torch.from_numpy(values).view(tensor.shape))
    return digest.hexdigest()


def recipe_values(name: str, tensor: Tensor, seed: int, gain: float) -> np.ndarray:
    """Return the recipe's fp32 numbers of one tensor."""
    z = np.arange(1, tensor.numel() + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(((zlib.crc32(name.encode()) << 32) + seed) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    uniform = ((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
    signed = np.float32(2) * uniform - np.float32(1)
    if name.endswith("running_var") or (tensor.dim() == 1 and name.endswith("weight")):
        return np.float32(0.5) + uniform
    if tensor.dim() >= 2:
        return signed * np.float32(gain * math.sqrt(3 / math.prod(tensor.shape[1:])))
    return np.float32(0.2) * signed
