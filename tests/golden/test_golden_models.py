"""Stage C's network, compressor and previewer against the original's numbers.

Weights are stored with the original's names and pass through the same loader as a user's.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade_train.models.cascade_unet import CascadeUNet
from cascade_train.models.cascade_unet_config import BLOCK_TYPES, CascadeUNetConfig
from cascade_train.models.previewer import PreviewNetwork
from cascade_train.models.semantic_compressor import EfficientNetCompressor
from cascade_train.models.weights import load_module, load_network

CPU = torch.device("cpu")
BLOCKS = dict(zip("CTA", BLOCK_TYPES, strict=True))


def store_weights(variant: Any, folder: Path) -> str:
    """Write the variant's weights as the original would, and return the file's path."""
    facts = json.loads((variant.case / "meta.json").read_text())["variants"][variant.name]
    owner = type(variant)(variant.case, facts["weights_variant"] or variant.name)
    path = folder / "weights.safetensors"
    save_file(owner._group("w"), path)
    return str(path)


def network_of(variant: Any, folder: Path) -> CascadeUNet:
    """Build and load the network that a variant describes in the original's words."""
    args = variant.args["ctor"]
    config = CascadeUNetConfig(
        in_channels=args["c_in"],
        out_channels=args["c_out"],
        timestep_ratio_embedding_dim=args["c_r"],
        patch_size=args["patch_size"],
        conditioning_dim=args["c_cond"],
        block_out_channels=args["c_hidden"],
        num_attention_heads=args["nhead"],
        down_num_layers_per_block=args["blocks"][0],
        up_num_layers_per_block=args["blocks"][1],
        down_blocks_repeat_mappers=args["block_repeat"][0],
        up_blocks_repeat_mappers=args["block_repeat"][1],
        block_types_per_layer=[[BLOCKS[letter] for letter in level] for level in args["level_config"]],
        clip_text_in_channels=args["c_clip_text"],
        clip_text_pooled_in_channels=args["c_clip_text_pooled"],
        clip_image_in_channels=args["c_clip_img"],
        clip_seq=args["c_clip_seq"],
        effnet_in_channels=None,
        pixel_mapper_in_channels=None,
        kernel_size=args["kernel_size"],
        dropout=args["dropout"],
        self_attn=args["self_attn"],
        timestep_conditioning_type=args["t_conds"],
        switch_level=args["switch_level"],
    )
    network = config.build()
    load_network(network, store_weights(variant, folder), dtype=torch.float32, device=CPU)
    return network.eval()


def gradient(network: CascadeUNet, inputs: dict[str, Tensor], name: str) -> Tensor:
    """Return the gradient that the original calls grad.in.<input> or grad.w.<weight>."""
    kind, _, rest = name.removeprefix("grad.").partition(".")
    if kind == "in":
        return inputs[rest].grad
    prefix, fused, _ = rest.partition("attn.in_proj_weight")
    if not fused:
        return network.get_parameter(rest).grad
    return torch.cat([network.get_parameter(f"{prefix}{part}.weight").grad for part in ("to_q", "to_k", "to_v")])


def run(network: CascadeUNet, variant: Any) -> dict[str, Tensor]:
    """Compute everything that the case expects of one variant."""
    wanted, inputs = variant.outputs, variant.inputs
    for name in wanted:
        if name.startswith("grad.in."):
            inputs[name.removeprefix("grad.in.")].requires_grad_()
    control = {int(name[len("cnet.") :]): value for name, value in inputs.items() if name.startswith("cnet.")}
    sides = {name: inputs[name] for name in ("clip_text", "clip_img", "sca", "crp") if name in inputs}
    pooled = inputs["clip_text_pooled"]
    pred = network(inputs["x"], inputs["r"], pooled, **sides, control=control, return_dict=False)[0]
    got = {
        "y": pred,
        "r_embed": network.get_timestep_ratio_embedding(inputs["r"]),
        "clip_emb": network.get_clip_embeddings(pooled, sides["clip_text"], sides["clip_img"]),
    }
    if "loss" in wanted:
        got["loss"] = (pred * inputs["g"]).sum()
        got["loss"].backward()
    got |= {name: gradient(network, inputs, name) for name in wanted if name.startswith("grad.")}
    return {name: value.detach() for name, value in got.items()}


class GoldenNetwork:
    """Runs of the denoising network; feed-forward blocks belong to no published model and are not built."""

    case: str

    @classmethod
    def takes(cls, variant: Any) -> bool:
        return not any("F" in level for level in variant.args["ctor"]["level_config"])

    def test_network_is_the_originals(self, variant: Any, tmp_path: Path) -> None:
        variant.check(run(network_of(variant, tmp_path), variant), rows=...)  # the loss has no rows

    def test_network_with_recomputation_is_the_originals(self, variant: Any, tmp_path: Path) -> None:
        network = network_of(variant, tmp_path)
        network.gradient_checkpointing = True
        variant.check(run(network, variant), rows=...)


class TestStageCForward(GoldenNetwork):
    case = "stage_c_forward"

    def test_all_10_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 10


class TestStageCControl(GoldenNetwork):
    case = "stage_c_cnet"

    def test_all_5_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 5


class TestPreviewer:
    case = "previewer"

    @classmethod
    def takes(cls, variant: Any) -> bool:
        return True

    def test_preview_is_the_originals(self, variant: Any, tmp_path: Path) -> None:
        args = variant.args["ctor"]
        with torch.device("meta"):
            network = PreviewNetwork(args["c_in"], args["c_hidden"], args["c_out"])
        source = store_weights(variant, tmp_path)
        load_module(network, source, dtype=torch.float32, device=CPU, key="model.previewer.weights")
        with torch.no_grad():
            variant.check({"image": network.eval()(variant.inputs["latent"])})

    def test_both_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 2


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


class TestCompressor:
    case = "effnet_encoder"

    @classmethod
    def takes(cls, variant: Any) -> bool:
        return True

    @pytest.fixture(scope="class")
    @classmethod
    def compressor(cls) -> EfficientNetCompressor:
        compressor = EfficientNetCompressor(weights=None)
        compressor.build(device=CPU)
        return compressor

    def test_latents_are_the_originals(self, variant: Any, compressor: EfficientNetCompressor) -> None:
        module, args, image = compressor.module, variant.args, variant.inputs["image"]
        assert recipe_fill(module, args["recipe_seed"], args["recipe_gain"]) == variant.facts["recipe_sha256"]
        assert len(module.state_dict()) == variant.facts["n_keys"]
        with torch.no_grad():
            got = {"backbone": module.backbone(image), "latent": module(image)}
        variant.check(got | {"latent_of_preprocessed": compressor.encode(image)})

    def test_both_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 2
