"""The fused GELU, response norm and dropout beside their parts: time, interleaved, and what is kept for backward.

python bench/response_norm.py --width 256 --side 24 --batch 4 --rounds 5 --device cpu
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from diffusers.models.unets.unet_stable_cascade import SDCascadeResBlock
from torch import Tensor, nn

from cascade_train.models.cascade.networks.response_norm import set_kernels
from cascade_train.models.cascade.unet_config import BLOCK_TYPES, CascadeUNetConfig

KINDS = ("eager", "fused")
HEAD = ("what", "dtype", "dropout", "eager ms", "fused ms", "ratio", "eager kept", "fused kept")


def network(width: int, dropout: float) -> nn.Module:
    """Return Stage C with 6 triples of one width, with values drawn for every weight."""
    made = CascadeUNetConfig(
        in_channels=16, out_channels=16, timestep_ratio_embedding_dim=64, patch_size=1, conditioning_dim=width,
        block_out_channels=[width, width], num_attention_heads=[width // 64] * 2, down_num_layers_per_block=[1, 2],
        up_num_layers_per_block=[2, 1], down_blocks_repeat_mappers=[1, 1], up_blocks_repeat_mappers=[1, 1],
        block_types_per_layer=[list(BLOCK_TYPES)] * 2, clip_text_in_channels=width, clip_text_pooled_in_channels=width,
        clip_image_in_channels=width, clip_seq=4, effnet_in_channels=None, pixel_mapper_in_channels=None,
        kernel_size=3, dropout=[dropout] * 2, self_attn=True, timestep_conditioning_type=["sca", "crp"],
        switch_level=[False],
    ).build().to_empty(device="cpu")  # fmt: skip
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.05)
    return made.train()


def steps(options: argparse.Namespace, dtype: torch.dtype, dropout: float) -> dict[str, Callable[[str], Tensor]]:
    """Return, by what is measured, a forward pass with one kind of kernels."""
    made = {"device": options.device, "dtype": dtype}
    batch, side, width = options.batch, options.side, options.width
    block = SDCascadeResBlock(width, dropout=dropout).to(**made)
    x = torch.randn(batch, width, side, side, **made).to(memory_format=torch.channels_last).requires_grad_()
    whole = nn.Module.to(network(width, dropout), **made)
    conditions = {
        "sample": torch.randn(batch, 16, side, side, device=options.device),
        "timestep_ratio": torch.rand(batch, device=options.device),
        "clip_text_pooled": torch.randn(batch, 1, width, **made),
        "clip_text": torch.randn(batch, 77, width, **made),
        "clip_img": torch.zeros(batch, 1, width, **made),
    }

    def run(module: nn.Module, kernels: str, forward: Callable[[], Tensor]) -> Tensor:
        set_kernels(module, kernels)  # type: ignore[arg-type]
        return forward()

    return {
        "residual block": lambda kernels: run(block, kernels, lambda: block(x)),
        "network": lambda kernels: run(whole, kernels, lambda: whole(**conditions, return_dict=False)[0]),
    }


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Return the bytes of the distinct tensors that autograd keeps, parameters included."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _ = forward()
        return sum(kept.values())


def milliseconds(forward: Callable[[], Tensor], device: str) -> float:
    """Return the time of a forward and backward pass: of the CPU itself, or of the device."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    begun = clock()
    forward().square().mean().backward()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (clock() - begun)


def main() -> None:
    """Measure and print the table; the ratio is the median over rounds of the parts' time by the fused one's."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("width", 256), ("side", 24), ("batch", 4), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"width {options.width}, {options.side} x {options.side}, batch {options.batch}, {options.device}, "
          f"torch {torch.__version__}")  # fmt: skip
    print("{:15s} {:9s} {:>8s} {:>9s} {:>9s} {:>6s} {:>11s} {:>11s}".format(*HEAD))
    for dtype in (torch.float32, torch.bfloat16):
        for dropout in (0.0, 0.1):
            for what, forward in steps(options, dtype, dropout).items():
                times: dict[str, list[float]] = {kind: [] for kind in KINDS}
                for _ in range(options.rounds + 1):
                    for kind in KINDS:
                        times[kind].append(milliseconds(partial(forward, kind), options.device))
                eager, fused = (times[kind][1:] for kind in KINDS)
                ratio = statistics.median(a / b for a, b in zip(eager, fused, strict=True))
                kept = [kept_bytes(partial(forward, kind)) / 2**20 for kind in KINDS]
                print(f"{what:15s} {str(dtype)[6:]:9s} {dropout:8.1f} {statistics.median(eager):9.1f} "
                      f"{statistics.median(fused):9.1f} {ratio:6.2f} {kept[0]:7.1f} MiB "
                      f"{kept[1]:7.1f} MiB")  # fmt: skip


if __name__ == "__main__":
    main()
