"""What adapts to the losses of training, and its state: a running average of the loss per bucket of logSNR.

Shape legend: B micro-batch, G samples of the global batch, N buckets.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.options import Rising, Several, Share


class Adaptive:
    """Base of what may learn from the losses of training; by default it learns nothing, and has no state."""

    def after_step(self, logsnr_G: Tensor, loss_raw_G: Tensor) -> None:
        """Learn from a global batch: (G,) logSNR and unweighted loss."""

    def after_micro_batch(self, logsnr_B: Tensor, loss_raw_B: Tensor) -> None:
        """Learn from a micro-batch of this rank, (B,) each."""

    def state_dict(self) -> dict[str, Tensor]:
        """Learned state; empty by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True, kw_only=True)
class Bucketed(Adaptive, abc.ABC):
    """Base of what learns a running loss per bucket of logSNR, starting at 1.

    All arithmetic is in a fixed order, so equal inputs give equal bits on every rank.

    Attributes:
        logsnr_range: lowest and highest logSNR, where the buckets begin and end.
        buckets: number of buckets, at least 2.
        beta: share of the old loss that an update keeps, in [0, 1].
        duplicates: of several samples of one bucket, "mean" takes the mean loss, "last" the last one's (the original).
    """

    logsnr_range: Rising[list[float]]
    buckets: Several[int]
    beta: Share[float]
    duplicates: Literal["mean", "last"] = "mean"

    @cached_property
    def _state(self) -> dict[str, Tensor]:
        return {"bucket_loss": torch.ones(self.buckets, dtype=torch.float32, device="cpu")}

    def loss_on(self, device: torch.device) -> Tensor:
        """Running losses, (N,) fp32, which stay on `device`."""
        self._state["bucket_loss"] = self._state["bucket_loss"].to(device)
        return self._state["bucket_loss"]

    @abc.abstractmethod
    def bucket(self, logsnr_B: Tensor) -> Tensor:
        """Bucket, (B,) int64 in [0, N), of (B,) logSNR."""

    def after_step(self, logsnr_G: Tensor, loss_raw_G: Tensor) -> None:
        """Learn from a global batch; buckets without a sample stay."""
        old_N, loss_G = self.loss_on(loss_raw_G.device), loss_raw_G.detach().float()
        hit_GN = self.bucket(logsnr_G)[:, None] == torch.arange(self.buckets, device=old_N.device)
        new_N = _last(hit_GN, loss_G) if self.duplicates == "last" else _mean(hit_GN, loss_G)
        self._state["bucket_loss"] = torch.where(hit_GN.any(0), self.beta * old_N + (1 - self.beta) * new_N, old_N)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the running losses."""
        return {name: loss_N.clone() for name, loss_N in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; a ConfigError if it has another number of buckets."""
        loss_N = state["bucket_loss"]
        if loss_N.shape != (self.buckets,):
            raise ConfigError(
                f"buckets={self.buckets}, but the saved state has {loss_N.numel()}; "
                "set buckets to the saved number or start a new run"
            )
        self._state["bucket_loss"] = loss_N.detach().to(self._state["bucket_loss"], copy=True)


class AdaptiveParts(Adaptive, abc.ABC):
    """Base of what consists of parts that may adapt: all learn, and are saved by name."""

    @abc.abstractmethod
    def _parts(self) -> Mapping[str, Adaptive]:
        """Parts by name."""

    def after_step(self, logsnr_G: Tensor, loss_raw_G: Tensor) -> None:
        """See `Adaptive.after_step`."""
        for part in self._parts().values():
            part.after_step(logsnr_G.detach(), loss_raw_G.detach())

    def after_micro_batch(self, logsnr_B: Tensor, loss_raw_B: Tensor) -> None:
        """Let every part learn from a micro-batch. Does not sync."""
        for part in self._parts().values():
            part.after_micro_batch(logsnr_B.detach(), loss_raw_B.detach())

    def state_dict(self) -> dict[str, Tensor]:
        """State of all parts, each with its name and a dot in front."""
        return {
            f"{name}.{key}": value for name, part in self._parts().items() for key, value in part.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        for name, part in self._parts().items():
            part.load_state_dict({k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")})


def _mean(hit_GN: Tensor, loss_G: Tensor) -> Tensor:
    """Mean loss per bucket, (N,); 0 where a bucket has no sample."""
    total_N = torch.where(hit_GN, loss_G[:, None], 0.0).sum(0)
    return total_N / hit_GN.sum(0).clamp(min=1)


def _last(hit_GN: Tensor, loss_G: Tensor) -> Tensor:
    """Loss of the last sample of each bucket, (N,); any value where a bucket has no sample."""
    order_G = torch.arange(loss_G.numel(), device=loss_G.device)
    return loss_G[torch.where(hit_GN, order_G[:, None], 0).amax(0)]
