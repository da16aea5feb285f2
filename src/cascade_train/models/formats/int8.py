"""Frozen linear layers in 8 bits, dequantized where they are used.

Symmetric codes, rounded to the nearest, with a scale for each block of a row, as in weight-only quantization of
torchao and bitsandbytes. Must not live here: which layers are quantized (assembly/model.py), moments of optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cascade_train.models.initialize import Shares

BLOCK = 64
"""Numbers of a row that share a scale; a row that it does not divide has one."""

LARGEST = 127
SCALE = ".weight_scale"
"""Ending of the name of a layer's scales."""

AT_ONCE = 2**26
"""Numbers of weights that are read in fp32 at once, unless one weight has more."""


def encode(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the nearest codes of a weight (out, in), int8, and their scales (out, blocks of a row) in a dtype."""
    blocks = weight.float().unflatten(1, (blocks_of(weight.shape[1]), -1))
    scales = (blocks.abs().amax(dim=2) / LARGEST).clamp(min=1e-30).to(dtype)
    codes = (blocks / scales.float().unsqueeze(2)).round_().clamp_(-LARGEST, LARGEST)
    return codes.flatten(1).to(torch.int8), scales


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (out, in) of codes and scales."""
    blocks = codes.to(dtype).unflatten(1, (scales.shape[1], -1))
    return (blocks * scales.to(dtype).unsqueeze(2)).flatten(1)


def blocks_of(inputs: int) -> int:
    """Return how many blocks a row has."""
    return inputs // BLOCK if inputs % BLOCK == 0 else 1


class _Product(torch.autograd.Function):
    """A linear layer that keeps codes for backward, not the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """Return x (..., in) times the weight, plus the bias: (..., out)."""
        ctx.save_for_backward(codes, scales)
        return functional.linear(x, decode(codes, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of x."""
        codes, scales = ctx.saved_tensors
        return gradient @ decode(codes, scales, gradient.dtype), None, None, None


class Int8Linear(nn.Module):
    """A frozen linear layer in 8 bits.

    Attributes:
        weight: codes, (out, in) int8.
        weight_scale: (out, blocks of a row), in the dtype that the layer had.
        bias: that of the layer.
    """

    def __init__(self, layer: nn.Linear) -> None:
        """Encode a layer, with its mode; of one on the meta device without values, see `fill_codes`."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        codes, scales = encode(layer.weight.detach(), layer.weight.dtype)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) of (..., in)."""
        return _Product.apply(x, self.weight, self.weight_scale, self.bias)


def quantize(modules: Iterable[nn.Module]) -> int:
    """Put the frozen linear layers below some modules into 8 bits, in place; return how many there are."""
    done: dict[nn.Linear, Int8Linear] = {}
    for owner in (each for module in modules for each in module.modules()):
        for name, layer in list(owner.named_children()):
            if type(layer) is nn.Linear and not layer.weight.requires_grad:
                done[layer] = done.get(layer) or Int8Linear(layer)
                setattr(owner, name, done[layer])
    return len(done)


def fill_codes(fill: Callable[[Shares], None], shares: Shares) -> None:
    """Fill memory by the names of a network with `fill`, codes and scales through rows in fp32, few at a time."""
    codes = {name: share for name, share in shares.items() if share[0].dtype == torch.int8}
    scales = {f"{name.removesuffix('.weight')}{SCALE}" for name in codes}
    fill({name: share for name, share in shares.items() if name not in codes and name not in scales})
    waiting: dict[str, tuple[Tensor, int]] = {}
    for name, (rows, first) in codes.items():
        if sum(each.numel() for each, _ in waiting.values()) + rows.numel() > AT_ONCE:
            _encode_filled(fill, waiting, shares)
        waiting[name] = (torch.empty(rows.shape), first)
    _encode_filled(fill, waiting, shares)


def _encode_filled(fill: Callable[[Shares], None], waiting: dict[str, tuple[Tensor, int]], shares: Shares) -> None:
    fill(waiting)
    for name, (rows, _) in waiting.items():
        scales = shares[f"{name.removesuffix('.weight')}{SCALE}"][0]
        for memory, values in zip((shares[name][0], scales), encode(rows, scales.dtype), strict=True):
            memory.copy_(values)
    waiting.clear()
