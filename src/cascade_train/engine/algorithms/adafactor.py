"""torch's Adafactor, but its norms stay on the device: torch's own brings two numbers of each weight to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Adafactor(torch.optim.Adafactor):
    """Moments of rows and columns alone, and steps relative to the size of each weight (Shazeer & Stern 2018).

    State and numbers are those of `torch.optim.Adafactor`, up to the rounding of a step's size.

    Args:
        lr: learning rate, times the root mean square of each weight; it falls below 1 / sqrt(step).
        weight_decay: decoupled, times `lr`.
        beta2_decay: exponent of the step in the share of a new square, at most 0.
        eps: least root of a moment, None = that of the weight's dtype; and least root mean square of a weight.
        d: root mean square above which an update is scaled down, at least 1.
    """

    needs_whole = True  # norms, and means of rows and columns

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float = 0.0,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, beta2_decay=beta2_decay, eps=eps, d=d)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients; a closure is not called."""
        for group in self.param_groups:
            lists: list[list[Any]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            for tensors in zip(*lists, strict=True):
                _update(*tensors, group=group)


def _update(
    weight: nn.Parameter,
    gradient: Tensor,
    row_var: Tensor | None,
    col_var: Tensor | None,
    variance: Tensor | None,
    step: Tensor,
    *,
    group: dict[str, Any],
) -> None:
    """Do what torch.optim.adafactor does for a weight (step 4 to 14 of its algorithm); `step` is on the host."""
    lr, eps1, eps2 = group["lr"], group["eps"][0], group["eps"][1]
    eps1 = torch.finfo(weight.dtype).eps if eps1 is None else eps1
    step += 1
    share = step.item() ** group["beta2_decay"]
    size = math.sqrt(weight.numel())
    alpha = (weight.norm(2) / size).clamp(min=eps2) * min(lr, 1 / step.item() ** 0.5)
    if group["weight_decay"] != 0:
        weight.mul_(1 - lr * group["weight_decay"])
    if row_var is not None and col_var is not None:
        for kept, dim in ((row_var, -1), (col_var, -2)):
            mean = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True).square_().div_(gradient.size(dim))
            kept.lerp_(mean, share)
        estimate = (row_var @ col_var).div_(row_var.mean(dim=-2, keepdim=True).clamp_(min=eps1))
    else:
        assert variance is not None
        estimate = variance.lerp_(gradient * gradient, share).clone()
    update = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(gradient)
    weight.sub_(update.mul_(alpha / (update.norm(2) / (size * group["d"])).clamp(min=1.0)))
