"""Optimizers: which parameters decay, how the learning rate scales, and any torch algorithm behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

NO_DECAY_SUFFIXES = (".gamma", ".beta", ".lora_magnitude_vector.weight")
"""Parameters with two or more dimensions that are still scales or shifts (the response norm's)."""


class OptimizerSpec:
    """A learning rate, a weight decay and a torch algorithm, not yet bound to parameters."""

    def __init__(
        self,
        *,
        lr: float,
        scale_lr: bool,
        weight_decay: float,
        algorithm: Callable[..., Optimizer],
        decay: Literal["matrices", "all"] = "matrices",
    ) -> None:
        """Check and store.

        Args:
            lr: learning rate.
            scale_lr: multiply `lr` by the global batch size.
            weight_decay: of what `decay` names.
            algorithm: called with parameter groups, e.g. a partial of `torch.optim.AdamW`.
            decay: "matrices" and kernels alone, not norms, biases, response norms and tokens; "all" as in the original.

        Raises:
            ValueError: a value out of its range.
        """
        if lr <= 0:
            raise ValueError(f"optimizer.lr={lr} must be positive.")
        if weight_decay < 0:
            raise ValueError(f"optimizer.weight_decay={weight_decay} must be 0 or more.")
        if decay not in ("matrices", "all"):
            raise ValueError(f"optimizer.decay={decay} must be matrices or all.")
        self.lr = lr
        self.scale_lr = scale_lr
        self.weight_decay = weight_decay
        self.algorithm = algorithm
        self.decay_all = decay == "all"

    def base_lr(self, global_batch_size: int) -> float:
        """Return the learning rate before the schedule."""
        return self.lr * global_batch_size if self.scale_lr else self.lr

    def build(self, parameters: Mapping[str, nn.Parameter], global_batch_size: int) -> Optimizer:
        """Return the algorithm over two groups, with and without weight decay; empty groups are left out."""
        decayed = [p for name, p in parameters.items() if self.decay_all or decays(name, p)]
        kept = [p for name, p in parameters.items() if not (self.decay_all or decays(name, p))]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": self.weight_decay},
            {"params": kept, "weight_decay": 0.0},
        ]
        return self.algorithm([g for g in groups if g["params"]], lr=self.base_lr(global_batch_size))


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: matrices and kernels, not biases, norms, response norms or tokens."""
    return parameter.ndim >= 2 and not name.endswith(NO_DECAY_SUFFIXES) and "token" not in name


def can_withhold(optimizer: Optimizer) -> bool:
    """Return whether the optimizer can skip an update by a flag on the device (fused Adam and SGD can)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
