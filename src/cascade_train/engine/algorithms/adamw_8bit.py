"""AdamW with moments of 8 bits, in blocks that never cross a row: however rows are divided, the bits are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, and whether their numbers have a sign."""


@cache
def code_values(signed: bool, device: torch.device) -> Tensor:
    """Values of the 256 codes, ascending, in [-1, 1] or [0, 1] (dynamic tree quantisation).

    A code has an exponent of ten and, the larger that is, the more bits of a fraction (Dettmers et al. 2022, 1.3).
    Here no code of [0, 1] is 0: the second moment divides.
    """
    values = [0.0 if signed else 1e-7, 1.0]
    for exponent in range(7):
        steps = 2 ** (exponent if signed else exponent + 1)
        middles = [0.1 + 0.9 * (step + 0.5) / steps for step in range(steps)]
        positive = [10.0 ** (exponent - 6) * middle for middle in middles]
        values += [*positive, *(-code for code in positive)] if signed else positive
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


def encode(values: Tensor, block: int, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Nearest codes of fp32 values (R, ...), uint8 of their shape, and the scales (R, blocks of a row)."""
    blocks = values.reshape(len(values), math.prod(values.shape[1:]) // block, block)
    scales = blocks.abs().amax(dim=2)
    levels = code_values(signed, values.device)
    relative = blocks / scales.clamp(min=1e-30).unsqueeze(2)
    nearest = torch.bucketize(relative, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    return nearest.to(torch.uint8).view(values.shape), scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Fp32 values of codes."""
    values = code_values(signed, codes.device)[codes.int()]
    blocks = values.view(*scales.shape, math.prod(codes.shape[1:]) // scales.shape[1])
    return (blocks * scales.unsqueeze(2)).view(codes.shape)


class AdamW8bit(Optimizer):
    """AdamW whose moments are 8-bit codes with a scale for each block (Dettmers et al. 2022).

    Kernels, biases, norms and narrow rows, whose second dimension is no multiple of the block, have moments in fp32.

    Args:
        betas: of both moments, in [0, 1).
        eps: added to the denominator.
        block_size: numbers of a row that share a scale.
    """

    by_element: ClassVar[bool] = True  # a rank can update its rows alone

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float],
        eps: float,
        block_size: int,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be 1 or more.")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas={[*betas]} must be two numbers in [0, 1).")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self.block_size = block_size

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients; a closure is not called."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        """Take AdamW's step with moments in fp32, then encode them again."""
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = (self._moment(parameter, name) for name in MOMENTS)
        exp_avg.lerp_(gradient, 1.0 - beta1)
        exp_avg_sq.lerp_(gradient.square(), 1.0 - beta2)
        step_size = group["lr"] / (1.0 - beta1 ** group["step"])
        denominator = exp_avg_sq.sqrt().div_(math.sqrt(1.0 - beta2 ** group["step"])).add_(group["eps"])
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(exp_avg, denominator, value=-step_size)
        if self._has_codes(parameter):
            for (name, signed), moment in zip(MOMENTS.items(), (exp_avg, exp_avg_sq), strict=True):
                codes, scales = encode(moment, self.block_size, signed=signed)
                self.state[parameter] |= {f"{name}_codes": codes, f"{name}_scales": scales}

    def _moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        """A moment in fp32."""
        state = self.state[parameter]
        if f"{name}_codes" in state:
            return decode(state[f"{name}_codes"], state[f"{name}_scales"], signed=MOMENTS[name])
        if self._has_codes(parameter):
            return torch.zeros_like(parameter)
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        moment: Tensor = state[name]
        return moment

    def _has_codes(self, parameter: Tensor) -> bool:
        return parameter.ndim >= 2 and parameter.shape[1] % self.block_size == 0
