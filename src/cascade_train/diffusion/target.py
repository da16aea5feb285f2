"""What the network predicts, and how a prediction becomes x0 and noise.

All formulas are exact for any a and b, from noised = a * x0 + b * noise. Scales come from scaling.py.

Shape legend: B batch, C channels, H W latent size; a and b are (B, 1, 1, 1).
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

from torch import Tensor

from cascade_train.options import Positive, check_fields


class Target(abc.ABC):
    """A prediction target and its two inverses (Stable Cascade, gdf/targets); all tensors fp32."""

    @abc.abstractmethod
    def __call__(self, x0_BCHW: Tensor, noise_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """Target (B, C, H, W) of clean latents and noise."""

    @abc.abstractmethod
    def x0(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """Clean latents (B, C, H, W) that a prediction implies."""

    @abc.abstractmethod
    def noise(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """Noise (B, C, H, W) that a prediction implies."""


class EpsilonTarget(Target):
    """The noise itself (Ho et al. 2020, eq. 12)."""

    def __call__(self, x0_BCHW: Tensor, noise_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target`."""
        return noise_BCHW

    def x0(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target.x0`. Divides by a."""
        return (noised_BCHW - b_B111 * pred_BCHW) / a_B111

    def noise(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target.noise`."""
        return pred_BCHW


class X0Target(Target):
    """The clean latents."""

    def __call__(self, x0_BCHW: Tensor, noise_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target`."""
        return x0_BCHW

    def x0(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target.x0`."""
        return pred_BCHW

    def noise(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target.noise`. Divides by b."""
        return (noised_BCHW - a_B111 * pred_BCHW) / b_B111


class VTarget(Target):
    """Velocity, v = a * noise - b * x0 (Salimans & Ho 2022, section 4)."""

    def __call__(self, x0_BCHW: Tensor, noise_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target`."""
        return a_B111 * noise_BCHW - b_B111 * x0_BCHW

    def x0(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target.x0`."""
        return (a_B111 * noised_BCHW - b_B111 * pred_BCHW) / (a_B111**2 + b_B111**2)

    def noise(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target.noise`."""
        return (b_B111 * noised_BCHW + a_B111 * pred_BCHW) / (a_B111**2 + b_B111**2)


class RectifiedFlowTarget(Target):
    """Direction from data to noise, noise - x0 (Liu et al. 2022, eq. 1)."""

    def __call__(self, x0_BCHW: Tensor, noise_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target`."""
        return noise_BCHW - x0_BCHW

    def x0(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target.x0`."""
        return (noised_BCHW - b_B111 * pred_BCHW) / (a_B111 + b_B111)

    def noise(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target.noise`."""
        return (noised_BCHW + a_B111 * pred_BCHW) / (a_B111 + b_B111)


@dataclass(frozen=True, kw_only=True)
class EDMTarget(Target):
    """What EDM's network itself predicts, (x0 - c_skip (x0 + sigma noise)) / c_out (Karras et al. 2022, table 1).

    Needs `EDMScaling` of the same `sigma_data`, for which it is b x0 / sigma_data - a sigma_data noise. A constant loss
    weight of 1 then is the paper's lambda in the loss of x0.

    Attributes:
        sigma_data: standard deviation of the latents, > 0.
    """

    sigma_data: Positive[float]

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, x0_BCHW: Tensor, noise_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target`."""
        return b_B111 / self.sigma_data * x0_BCHW - a_B111 * self.sigma_data * noise_BCHW

    def x0(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target.x0`."""
        return self.sigma_data**2 * a_B111 * noised_BCHW + self.sigma_data * b_B111 * pred_BCHW

    def noise(self, pred_BCHW: Tensor, noised_BCHW: Tensor, a_B111: Tensor, b_B111: Tensor) -> Tensor:
        """See `Target.noise`."""
        return b_B111 * noised_BCHW - self.sigma_data * a_B111 * pred_BCHW
