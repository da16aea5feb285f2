"""What a frozen network in 8 bits changes of a step: prediction, loss and gradient of its input, beside bf16.

    python bench/int8.py --width 1024

Stage C with 6 triples of one width and drawn values, or the packaged one (`--packaged`), which is trained. Errors
are against fp32, relative. Trained weights of the published sizes are not measured here.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tests` is a package of this checkout

from cascade_train.models.cascade.unet_config import BLOCK_TYPES, CascadeUNetConfig
from cascade_train.models.formats import int8
from cascade_train.models.formats.weights import load_state

HEAD = ("weights", "compute", "GiB", "prediction", "loss", "gradient")


def network(width: int) -> nn.Module:
    """Return Stage C with 6 triples of one width, with values drawn for every weight."""
    made = CascadeUNetConfig(
        in_channels=16, out_channels=16, timestep_ratio_embedding_dim=64, patch_size=1, conditioning_dim=width,
        block_out_channels=[width, width], num_attention_heads=[width // 64] * 2, down_num_layers_per_block=[1, 2],
        up_num_layers_per_block=[2, 1], down_blocks_repeat_mappers=[1, 1], up_blocks_repeat_mappers=[1, 1],
        block_types_per_layer=[list(BLOCK_TYPES)] * 2, clip_text_in_channels=width, clip_text_pooled_in_channels=width,
        clip_image_in_channels=width, clip_seq=4, effnet_in_channels=None, pixel_mapper_in_channels=None,
        kernel_size=3, dropout=[0.0] * 2, self_attn=True, timestep_conditioning_type=["sca", "crp"],
        switch_level=[False],
    ).build().to_empty(device="cpu")  # fmt: skip
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.05)
    return made.train()


def packaged() -> nn.Module:
    """Return the packaged tiny Stage C."""
    from tests.unit.models.stages import make_stage

    stage = make_stage("c_tiny")
    made = stage.network_config.build()
    load_state(made, stage.weights, dtype=torch.float32, part=stage.part)
    return made


def step(made: nn.Module, side: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return prediction, loss and gradient of the input of a step on drawn numbers."""
    config, draw = made.config, torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    noised = normal(2, config.in_channels, side, side).to(dtype).requires_grad_()
    sizes = {
        "clip_text": (77, config.clip_text_in_channels),
        "clip_text_pooled": (1, config.clip_text_pooled_in_channels),
        "clip_img": (1, config.clip_image_in_channels),
    }
    cond = {name: normal(2, *size).to(dtype) for name, size in sizes.items()}
    found = made(noised, torch.tensor([0.3, 0.7]), **cond, return_dict=False)[0].float()
    loss = (found - normal(*found.shape)).square().mean()
    loss.backward()
    return found.detach(), loss.detach(), noised.grad.float()


def gib(made: nn.Module) -> float:
    """Return the memory of a network's weights."""
    return sum(p.numel() * p.element_size() for p in made.parameters()) / 2**30


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--side", type=int, default=12)
    parser.add_argument("--packaged", action="store_true")
    args = parser.parse_args()
    made = (packaged() if args.packaged else network(args.width)).eval().requires_grad_(False)
    exact = step(made, args.side, torch.float32)
    blocks = int8.BLOCK
    print(("{:>22} {:>8} {:>7}" + " {:>10}" * 3).format(*HEAD))
    for name, dtype, block in (
        ("bf16", torch.bfloat16, None),
        (f"int8, blocks of {blocks}", torch.float32, blocks),
        (f"int8, blocks of {blocks}", torch.bfloat16, blocks),
        ("int8, rows", torch.bfloat16, sys.maxsize),
    ):
        trial = nn.Module.to(copy.deepcopy(made), dtype)  # diffusers' own warns
        if block is not None:
            int8.BLOCK = block
            trial = copy.deepcopy(made)
            int8.quantize(module for unit in trial.units() for module in unit)
            for parameter in trial.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(step(trial, args.side, dtype), exact, strict=True)]
        size = f"{gib(trial):.3f}"
        print(f"{name:>22} {str(dtype).removeprefix('torch.'):>8} {size:>7}" + "".join(f" {e:>10.2e}" for e in errors))


if __name__ == "__main__":
    main()
