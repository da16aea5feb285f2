"""The weight of a sample's loss, as a function of its logSNR; one of them learns from the losses.

Shape legend: B batch, G samples of the global batch, N buckets.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cascade_train.diffusion.bucket import Adaptive, AdaptiveParts, Bucketed
from cascade_train.errors import ConfigError
from cascade_train.options import Positive, Rising, Share, check_above, check_fields


@dataclass(frozen=True, kw_only=True)
class LossWeight(Adaptive, abc.ABC):
    """A loss weight (Stable Cascade, gdf/loss_weights).

    Attributes:
        shift: the weight is that of logSNR + 2 ln(shift).
        clamp_range: lowest and highest weight; None = [-1e9, 1e9].
    """

    shift: Positive[float] = 1.0
    clamp_range: Rising[list[float] | None] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @abc.abstractmethod
    def _weight(self, logsnr_B: Tensor) -> Tensor:
        """Weight without shift and clamp; (B,) fp32 in and out."""

    def __call__(self, logsnr_B: Tensor) -> Tensor:
        """Weight, (B,) fp32, of (B,) logSNR."""
        low, high = (-1e9, 1e9) if self.clamp_range is None else self.clamp_range
        return self._weight(logsnr_B.float() + 2 * math.log(self.shift)).clamp(low, high)


@dataclass(frozen=True, kw_only=True)
class ConstantLossWeight(LossWeight):
    """The same weight everywhere.

    Attributes:
        v: the weight.
    """

    v: float

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        return torch.full_like(logsnr_B, self.v)


class SNRLossWeight(LossWeight):
    """SNR: with an epsilon target's inverse, the plain loss in x0 (Salimans & Ho 2022, section 4)."""

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        return logsnr_B.exp()


@dataclass(frozen=True, kw_only=True)
class P2LossWeight(LossWeight):
    """(k + SNR^s)^-gamma (Choi et al. 2022, eq. 8, with an exponent); Stable Cascade trains with 1, 1, 1.

    Attributes:
        k: keeps the weight finite at low SNR, > 0.
        gamma: strength.
        s: exponent of the SNR.
    """

    k: Positive[float]
    gamma: float
    s: float

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        return (self.k + (logsnr_B * self.s).exp()) ** -self.gamma


class SNRPlusOneLossWeight(LossWeight):
    """SNR + 1 (Salimans & Ho 2022, section 4)."""

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        return logsnr_B.exp() + 1


@dataclass(frozen=True, kw_only=True)
class MinSNRLossWeight(LossWeight):
    """min(SNR, max_snr), the weight in x0 of Hang et al. 2023, eq. 7; divide by SNR for an epsilon target.

    Attributes:
        max_snr: the paper's gamma, > 0.
    """

    max_snr: Positive[float]

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        return logsnr_B.exp().clamp(max=self.max_snr)


@dataclass(frozen=True, kw_only=True)
class MinSNRGammaLossWeight(LossWeight):
    """min(SNR, gamma) in the loss of x0, written for what the network predicts (Hang et al. 2023, eq. 7, section 3.4).

    Attributes:
        gamma: from this SNR on, less noise gets no more weight; 5 in the paper, > 0.
        target: what the network predicts: the weight is divided by SNR for epsilon, by SNR + 1 for v.
    """

    gamma: Positive[float]
    target: Literal["epsilon", "v", "x0"]

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        snr_B = logsnr_B.exp()
        divisor_B = {"epsilon": snr_B, "v": snr_B + 1, "x0": torch.ones_like(snr_B)}[self.target]
        return snr_B.clamp(max=self.gamma) / divisor_B


class MinSNRPlusOneLossWeight(MinSNRLossWeight):
    """min(SNR + 1, max_snr)."""

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        return (logsnr_B.exp() + 1).clamp(max=self.max_snr)


@dataclass(frozen=True, kw_only=True)
class TruncatedSNRLossWeight(LossWeight):
    """max(SNR, min_snr) (Salimans & Ho 2022, section 4).

    Attributes:
        min_snr: the floor, 1 in the paper.
    """

    min_snr: float

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        return logsnr_B.exp().clamp(min=self.min_snr)


@dataclass(frozen=True, kw_only=True)
class SechLossWeight(LossWeight):
    """1 / cosh(logSNR / div) (Kingma & Gao 2023, table 1).

    Attributes:
        div: width, > 0.
    """

    div: Positive[float]

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        return 1 / torch.cosh(logsnr_B / self.div)


class DebiasedLossWeight(LossWeight):
    """1 / sqrt(SNR) (Yu et al. 2023, eq. 9)."""

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        return (-logsnr_B / 2).exp()


@dataclass(frozen=True, kw_only=True)
class SigmoidLossWeight(LossWeight):
    """sigmoid(s * logSNR); s = 1 weighs data, s = -1 noise.

    Attributes:
        s: slope.
    """

    s: float

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        return (logsnr_B * self.s).sigmoid()


@dataclass(frozen=True, kw_only=True)
class ComposedLossWeight(AdaptiveParts, LossWeight):
    """A product of weights over a product of weights.

    Attributes:
        mul: the factors; their own shift and clamp apply.
        div: the divisors; their own shift and clamp apply.
    """

    mul: list[LossWeight]
    div: list[LossWeight]

    def __post_init__(self) -> None:
        if not self.mul and not self.div:
            raise ConfigError("mul=[] and div=[] leave nothing to compose; name at least one loss weight")
        super().__post_init__()

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        weight_B = torch.ones_like(logsnr_B)
        for factor in self.mul:
            weight_B = weight_B * factor(logsnr_B)
        for divisor in self.div:
            weight_B = weight_B / divisor(logsnr_B)
        return weight_B

    def _parts(self) -> dict[str, LossWeight]:
        sides = {"mul": self.mul, "div": self.div}
        return {f"{side}.{i}": part for side, parts in sides.items() for i, part in enumerate(parts)}


@dataclass(frozen=True, kw_only=True)
class AdaptiveLossWeight(Bucketed, LossWeight):
    """One over the running loss at this logSNR: every noise level counts equally (Stable Cascade).

    Buckets: one below, one above, the rest of equal width between the ends of the range. A sample is weighted before
    the running loss includes it.

    Attributes:
        logsnr_range: where the inner buckets begin and end.
        buckets: number of buckets, at least 3.
        weight_range: lowest and highest weight.
        update: "step" = once a step from the global batch, equally on all ranks; "micro_batch" = from each micro-batch,
            as in the original: every rank has buckets of its own, and a checkpoint has rank 0's.
    """

    beta: Share[float] = 0.99
    weight_range: Rising[list[float]]
    update: Literal["step", "micro_batch"] = "step"

    def __post_init__(self) -> None:
        check_above("buckets", self.buckets, 2)
        super().__post_init__()

    def _weight(self, logsnr_B: Tensor) -> Tensor:
        low, high = self.weight_range
        return (1 / self.loss_on(logsnr_B.device)[self.bucket(logsnr_B)]).clamp(low, high)

    def bucket(self, logsnr_B: Tensor) -> Tensor:
        """Bucket, (B,) int64, of (B,) logSNR."""
        low, high = self.logsnr_range
        edge_N = torch.linspace(low, high, self.buckets - 1, dtype=torch.float32, device=logsnr_B.device)
        return torch.searchsorted(edge_N, logsnr_B.detach().float().contiguous())

    def after_step(self, logsnr_G: Tensor, loss_raw_G: Tensor) -> None:
        """Learn from a global batch; nothing by update=micro_batch."""
        if self.update == "step":
            super().after_step(logsnr_G, loss_raw_G)

    def after_micro_batch(self, logsnr_B: Tensor, loss_raw_B: Tensor) -> None:
        """Learn from a micro-batch; nothing by update=step."""
        if self.update == "micro_batch":
            super().after_step(logsnr_B, loss_raw_B)
