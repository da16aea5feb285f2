"""Weights that train in bf16, without fp32 masters: each update is made in fp32 and rounded stochastically.

bf16 has 8 bits of a fraction: rounded to the nearest, steps of less than 1/512 of a weight are lost. Rounded up with
the probability of what would be cut off, they count on average (Gupta et al. 2015, equation 3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PIECE = 2**22
"""Numbers whose bits are made at once."""

CUT = 16
"""Bits of fp32 that bf16 lacks."""


def random_bits(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """16 random bits of each of the numbers `first` to `first + count` of a tensor, (count,) int32.

    They depend on key and number alone (Wellons 2018, lowbias32), so that they are the same however the numbers are
    divided among ranks. `key` has 32 bits.
    """
    x = torch.arange(first, first + count, device=device).to(torch.int32) ^ _signed(key)
    x = x ^ ((x >> 16) & 0xFFFF)  # shifts of int32 keep the sign
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(0x846CA68B)
    return (x ^ (x >> 16)) & 0xFFFF


def round_bf16(value: Tensor, bits: Tensor) -> Tensor:
    """Fp32 values in bf16, away from zero with the probability of what is cut off; `bits` from `random_bits`.

    Beyond the largest number of bf16 that is infinite. What is no number stays none: CUDA's has all bits set, and a sum
    with others would be a zero.
    """
    up = ((value.view(torch.int32) + bits) & -(1 << CUT)).view(torch.float32)
    return torch.where(value.isnan(), value, up).to(torch.bfloat16)


class StochasticRounding(Optimizer):
    """An algorithm on weights in bf16: it gets each of them, one after the other, in fp32; its state stays as it is.

    Args:
        inner: the algorithm, which treats each tensor by itself.
        places: of each parameter, its name and the number of its first element in the whole weight.
        seed: of the rounding.
    """

    def __init__(self, inner: Optimizer, places: Mapping[nn.Parameter, tuple[str, int]], *, seed: int) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._places = dict(places)
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients; a closure is not called."""
        for group in self.param_groups:
            rounding = group.get("rounding", 0) + 1
            before = {name: value for name, value in group.items() if name != "params"}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight = self._stepped(parameter, before)
                    self._put(parameter, weight, rounding)
                    group.update({k: v for k, v in self.inner.param_groups[0].items() if k != "params"})
            group["rounding"] = rounding

    def _stepped(self, parameter: nn.Parameter, settings: Mapping[str, Any]) -> Tensor:
        """A parameter after the algorithm's step, in fp32."""
        assert parameter.grad is not None
        weight = nn.Parameter(parameter.float())
        weight.grad = parameter.grad.float()
        self.inner.param_groups = [{**settings, "params": [weight]}]
        self.inner.state = defaultdict(dict, {weight: self.state[parameter]})
        self.inner.step()
        self.state[parameter] = self.inner.state[weight]
        return weight.detach()

    def _put(self, parameter: nn.Parameter, weight: Tensor, rounding: int) -> None:
        """Give a parameter its new values, rounded where it is in bf16."""
        if parameter.dtype != torch.bfloat16:
            parameter.copy_(weight)
            return
        name, first = self._places[parameter]
        digest = blake2b(f"{self._seed} {rounding} {name}".encode(), digest_size=4).digest()
        key, old, new = int.from_bytes(digest, "little"), parameter.view(-1), weight.view(-1)
        for start in range(0, old.numel(), PIECE):
            piece = new[start : start + PIECE]
            bits = random_bits(key, first + start, len(piece), piece.device)
            old[start : start + PIECE] = round_bf16(piece, bits)


def _signed(bits: int) -> int:
    """32 bits as the int32 that has them."""
    return bits - (1 << 32) if bits >> 31 else bits
