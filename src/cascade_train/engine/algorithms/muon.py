"""Muon for matrices and AdamW for everything else, as one algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cascade_train.engine.optimizer import decays


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon trains a parameter: weights of linear layers, not kernels, norms, biases or tokens."""
    return parameter.ndim == 2 and decays(name, parameter)


class Muon(Optimizer):
    """Momentum made orthogonal for matrices (torch.optim.Muon; Jordan 2024, Liu et al. 2025); AdamW for the rest.

    Args:
        momentum: of Muon, in [0, 1).
        nesterov: whether Muon looks ahead by its momentum.
        ns_steps: Newton-Schulz iterations that make a matrix orthogonal.
        adjust_lr_fn: match_rms_adamw = steps as large as AdamW's, whatever the shape, so that AdamW's rates and decays
            serve; original = steps that do not shrink with the shape, for rates near 0.02.
        lr_ratio: AdamW's learning rate over `lr`.
        betas: of AdamW, in [0, 1).
        eps: of AdamW.
    """

    takes_names = True

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        adjust_lr_fn: Literal["match_rms_adamw", "original"],
        lr_ratio: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        if lr_ratio <= 0:
            raise ValueError(f"lr_ratio={lr_ratio} must be positive.")
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        matrices, others = (_choose(groups, wanted) for wanted in (True, False))
        self._parts: list[Optimizer] = []
        if matrices:
            options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
            options |= {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": adjust_lr_fn}
            self._parts.append(torch.optim.Muon(matrices, **options))
        if others:
            options = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "fused": True}
            self._parts.append(torch.optim.AdamW([{**group, "lr_ratio": lr_ratio} for group in others], **options))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @staticmethod
    def by_element(name: str, parameter: nn.Parameter) -> bool:
        """Whether each number is updated by itself, so that a rank can update its shard alone."""
        return not is_matrix(name, parameter)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients; a closure is not called."""
        for part in self._parts:
            for_matrices = isinstance(part, torch.optim.Muon)
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if ("momentum" in group) == for_matrices]
            rates = [group["lr"] for group in part.param_groups]
            for group in part.param_groups:
                group["lr"] *= group.get("lr_ratio", 1.0)
            part.step()
            for group, lr in zip(part.param_groups, rates, strict=True):
                group["lr"] = lr


def _choose(groups: Iterable[dict[str, Any]], matrices: bool) -> list[dict[str, Any]]:
    """Groups with the matrices alone, or with all but them; empty ones are left out."""
    named = [
        (group, [entry if isinstance(entry, tuple) else ("", entry) for entry in group["params"]]) for group in groups
    ]
    chosen: list[tuple[dict[str, Any], list[Tensor]]] = [
        (group, [p for name, p in entries if is_matrix(name, p) == matrices]) for group, entries in named
    ]
    return [{**group, "params": parameters} for group, parameters in chosen if parameters]
