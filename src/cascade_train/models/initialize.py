"""Initial weights as a pure function of (seed, parameter name), drawn on the host.

Every parameter has its own generator, so order of creation, rank and device do not change a value. Numbers are drawn in
fp32 in chunks of fixed size and rounded to the parameter's dtype. Must not live here: stored weights
(formats/weights.py).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Shares = Mapping[str, tuple[Tensor, int]]
"""Memory by parameter name: rows of the parameter (its first dimension), and the number of the first of them."""

CHUNK = 1 << 18
"""Elements drawn at once (1 MiB of fp32, which stays in cache); part of the definition of every draw."""

FROZEN_SEED = 0
"""Seed of frozen towers without stored weights: they are part of the model, not of the run."""


@dataclass(frozen=True, kw_only=True)
class Fill:
    """How one parameter is filled.

    "constant" (every element is `scale`), "uniform" on [-scale, scale), or "normal" with standard deviation `scale`.
    """

    kind: Literal["constant", "uniform", "normal"]
    scale: float


ZEROS = Fill(kind="constant", scale=0.0)
ONES = Fill(kind="constant", scale=1.0)

Rule = Callable[[str, nn.Parameter], Fill]
"""Maps a parameter's name and the (possibly meta) parameter to its fill."""


def name_seed(seed: int, name: str) -> int:
    """Return the 63-bit generator seed of one parameter, a frozen function of the run's seed and its name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


@torch.no_grad()
def fill_(part: Tensor, fill: Fill, seed: int, name: str, *, begin: int = 0, total: int | None = None) -> None:
    """Fill `part` in place: the elements from number `begin` of a parameter of `total`, None = the whole one.

    Any shape, dtype and device; at most `CHUNK` fp32 numbers exist beside it. All chunks up to the end are drawn,
    since a generator cannot skip; on the meta device none.
    """
    if part.is_meta:
        return
    total = part.numel() if total is None else total
    if fill.kind == "constant" or fill.scale == 0.0:
        part.fill_(fill.scale)
        return
    generator = torch.Generator().manual_seed(name_seed(seed, name))
    flat, end = part.view(-1), begin + part.numel()
    buffer = torch.empty(min(CHUNK, total))
    for start in range(0, end if flat.numel() else 0, CHUNK):
        chunk = buffer[: min(CHUNK, total - start)]
        if fill.kind == "uniform":
            chunk.uniform_(-fill.scale, fill.scale, generator=generator)
        else:
            chunk.normal_(0.0, fill.scale, generator=generator)
        first, last = max(start, begin), min(start + chunk.numel(), end)
        if first < last:
            flat[first - begin : last - begin].copy_(chunk[first - start : last - start])


def materialise(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give a module on the meta device memory: undefined parameters, and buffers with their start values."""
    nn.Module.to(module, dtype)  # diffusers' own `to` warns about modules to keep in fp32, even when there are none
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        kind = name.rpartition(".")[2]
        if kind == "position_ids":
            buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))
        elif kind in ("running_mean", "num_batches_tracked"):
            buffer.zero_()
        elif kind == "running_var":
            buffer.fill_(1)
        else:
            raise AssertionError(f"buffer {name}: no start value is known for it")


def initialise(module: nn.Module, rule: Rule, *, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Give a module on the meta device memory on `device` and fill every parameter by `rule`."""
    materialise(module, device, dtype)
    if device.type == "meta":  # nothing has values there
        return
    DrawnValues(module, rule, seed=seed).fill({name: (p, 0) for name, p in module.named_parameters()})


class DrawnValues:
    """The values of an untrained module, which may lie on the meta device: each parameter by `rule`.

    Nothing is drawn before `fill`, whose memory may be any part of the parameters, of any dtype and device.
    """

    def __init__(self, module: nn.Module, rule: Rule, *, seed: int) -> None:
        self._fills = {
            name: (rule(name, p), p.numel(), math.prod(p.shape[1:])) for name, p in module.named_parameters()
        }
        self._seed = seed

    def fill(self, shares: Shares) -> None:
        """Draw each share, on as many threads as torch has: each parameter has its own generator."""
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            filled = [pool.submit(self._fill, name, *share) for name, share in shares.items()]
        for each in filled:
            each.result()

    def _fill(self, name: str, rows: Tensor, first: int) -> None:
        fill, total, row = self._fills[name]
        fill_(rows, fill, self._seed, name, begin=first * row, total=total)


def fan_in(weight: Tensor) -> int:
    """Return how many inputs each output of a weight (out, in, *kernel) sums."""
    return math.prod(weight.shape[1:])


def xavier(parameter: Tensor, gain: float = 1.0) -> Fill:
    """Return Xavier's uniform fill of a linear or convolution weight (out, in, *kernel); Glorot and Bengio eq. 16."""
    fans = fan_in(parameter) + parameter.shape[0] * math.prod(parameter.shape[2:])
    return Fill(kind="uniform", scale=gain * math.sqrt(6.0 / fans))


def unet_rule(residual_blocks: int) -> Rule:
    """Return the original's initialisation of Stage B and C (Stable Cascade, modules/stage_c.py and stage_b.py).

    Differs by layer: condition mappers N(0, 0.02); input embedding Xavier with gain 0.02; output, time mappers and
    response norms zero; the last linear of a residual block scaled by sqrt(1 / residual_blocks), those on the way down
    without repeats; query, key and value with the bound of one fused (3C, C) matrix; strided transposed convolutions as
    torch does; all else Xavier, biases zero.
    """
    residual_gain = math.sqrt(1.0 / residual_blocks)
    fills: tuple[tuple[str, Callable[[Tensor], Fill]], ...] = (
        # torch's own fill of a transposed 2 x 2 convolution and its bias, whose fan-in counts output channels
        (r"up_upscalers\.\d+\.1\.weight", lambda p: Fill(kind="uniform", scale=1 / math.sqrt(4 * p.shape[1]))),
        (r"up_upscalers\.\d+\.1\.bias", lambda p: Fill(kind="uniform", scale=1 / math.sqrt(4 * p.shape[0]))),
        (r".*\.(gamma|beta)|.*\.mapper(_\w+)?\.weight|clf\.1\.weight|.*bias", lambda _: ZEROS),
        (r"clip_\w+_mapper\.weight", lambda _: Fill(kind="normal", scale=0.02)),
        (r"(effnet|pixels)_mapper\.[02]\.weight", lambda _: Fill(kind="normal", scale=0.02)),
        (r"embedding\.1\.weight", lambda p: xavier(p, 0.02)),
        (r".*\.channelwise\.4\.weight", lambda p: xavier(p, residual_gain)),
        (r".*\.attention\.to_[qkv]\.weight", lambda p: Fill(kind="uniform", scale=math.sqrt(6 / (4 * p.shape[0])))),
        (r".*\.weight", xavier),
    )

    def rule(name: str, parameter: nn.Parameter) -> Fill:
        for pattern, fill in fills:
            if re.fullmatch(pattern, name):
                return fill(parameter)
        raise AssertionError(f"parameter {name}: no initialisation is known for it")

    return rule


def kernel_rule(kernel: Callable[[Tensor], Fill]) -> Rule:
    """Return a rule that fills weights of two or more dimensions by `kernel`; norms are one, biases zero."""

    def rule(name: str, parameter: nn.Parameter) -> Fill:
        if parameter.dim() >= 2:
            return kernel(parameter)
        return ONES if name.endswith("weight") else ZEROS

    return rule


def convolution_rule(gain: float) -> Rule:
    """Return the fill of a convolutional network: N(0, gain^2 / fan_in), norms one, biases zero."""
    return kernel_rule(lambda weight: Fill(kind="normal", scale=gain / math.sqrt(fan_in(weight))))


def torch_uniform(weight: Tensor) -> Fill:
    """Return torch's own fill of a convolution or linear layer."""
    return Fill(kind="uniform", scale=1.0 / math.sqrt(fan_in(weight)))


def torch_rule(network: nn.Module) -> Rule:
    """Return torch's own fill of every linear and convolution layer and its bias, as in diffusers' networks.

    Norms are one and zero.
    """
    layers = (nn.Linear, nn.Conv2d)
    scales = {n: 1.0 / math.sqrt(fan_in(m.weight)) for n, m in network.named_modules() if isinstance(m, layers)}

    def rule(name: str, parameter: nn.Parameter) -> Fill:
        owner, _, leaf = name.rpartition(".")
        if owner in scales:
            return Fill(kind="uniform", scale=scales[owner])
        return ONES if leaf == "weight" else ZEROS

    return rule


def tower_rule(name: str, parameter: nn.Parameter) -> Fill:
    """Return the fill of a frozen tower without stored weights: every layer keeps the scale of its input.

    Embeddings are N(0, 1) (positions N(0, 0.1)) so that different tokens stay far apart through random layers.
    """
    if name.endswith("token_embedding.weight"):
        return Fill(kind="normal", scale=1.0)
    if name.endswith(("position_embedding.weight", "class_embedding")):
        return Fill(kind="normal", scale=0.1)
    return convolution_rule(1.0)(name, parameter)
