"""Lion (Chen et al. 2023, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Steps of equal size in the direction of the sign of an interpolated momentum."""

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * torch.lerp(parameter.grad, momentum, first).sign())
                momentum.lerp_(parameter.grad, 1.0 - second)
