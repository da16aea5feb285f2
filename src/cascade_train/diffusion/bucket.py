"""A running average of the loss per bucket of logSNR: the state behind what adapts to the loss.

Lives here: the one stateful object of the diffusion maths. What is done with the averages (a loss
weight, a distribution of noise levels) lives with its user.

Shape legend: G samples of the global batch, N buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from cascade_train.diffusion.checks import check_above, check_choice, check_within
from cascade_train.errors import ConfigError


class BucketAverage:
    """Exponential moving average of the loss per bucket, starting at 1; (N,) fp32.

    The tensor moves once, to the device of the first argument that it meets, and stays there. All
    arithmetic is in a fixed order, so equal inputs give equal bits on every rank.
    """

    def __init__(self, *, buckets: int, beta: float, duplicates: Literal["mean", "last"]) -> None:
        """Store the options.

        Args:
            buckets: number of buckets, at least 2.
            beta: share of the old value that an update keeps, in [0, 1].
            duplicates: what several samples of one bucket in one update do: "mean" takes the mean of
                their losses; "last" lets the last sample win, as the original does.

        Raises:
            ConfigError: an option is out of range.
        """
        check_above("buckets", buckets, 1)
        check_within("beta", beta, 0.0, 1.0)
        check_choice("duplicates", duplicates, ("mean", "last"))
        self.beta = beta
        self.duplicates = duplicates
        self._loss_N = torch.ones(buckets, dtype=torch.float32, device="cpu")

    def on(self, device: torch.device) -> Tensor:
        """Return the averages, (N,) fp32, on `device`."""
        if self._loss_N.device != device:
            self._loss_N = self._loss_N.to(device)
        return self._loss_N

    def update(self, bucket_G: Tensor, loss_G: Tensor) -> None:
        """Fold one global batch into the averages; buckets without a sample keep their value.

        Args:
            bucket_G: (G,) int64 bucket of each sample, in [0, N).
            loss_G: (G,) fp32 loss of each sample, not weighted.
        """
        old_N = self.on(loss_G.device)
        loss_G = loss_G.detach().float()
        hit_GN = bucket_G[:, None] == torch.arange(old_N.numel(), device=old_N.device)
        new_N = _last(hit_GN, loss_G) if self.duplicates == "last" else _mean(hit_GN, loss_G)
        self._loss_N = torch.where(hit_GN.any(0), self.beta * old_N + (1 - self.beta) * new_N, old_N)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the averages."""
        return {"bucket_loss": self._loss_N.detach().clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ConfigError: the state has another number of buckets.
        """
        loss_N = state["bucket_loss"]
        if loss_N.shape != self._loss_N.shape:
            raise ConfigError(
                f"buckets={self._loss_N.numel()}, but the saved state has {loss_N.numel()}; "
                "set buckets to the saved number or start a new run"
            )
        self._loss_N = loss_N.detach().to(self._loss_N.device, torch.float32).clone()


def _mean(hit_GN: Tensor, loss_G: Tensor) -> Tensor:
    """Mean loss per bucket, (N,); 0 where a bucket has no sample."""
    total_N = torch.where(hit_GN, loss_G[:, None], 0.0).sum(0)
    return total_N / hit_GN.sum(0).clamp(min=1)


def _last(hit_GN: Tensor, loss_G: Tensor) -> Tensor:
    """Loss of the last sample of each bucket, (N,); any value where a bucket has no sample."""
    order_G = torch.arange(loss_G.numel(), device=loss_G.device)
    return loss_G[torch.where(hit_GN, order_G[:, None], 0).amax(0)]
