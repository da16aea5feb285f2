"""The diffusion objective: five small objects over logSNR, put together; the caller draws the random numbers.

Shape legend: B batch, G samples of the global batch, C channels, H W latent size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from cascade_train.diffusion.bucket import Adaptive, AdaptiveParts
from cascade_train.diffusion.distance import Distance
from cascade_train.diffusion.loss_weight import LossWeight, MinSNRGammaLossWeight
from cascade_train.diffusion.noise import Noise, PlainNoise
from cascade_train.diffusion.noise_condition import CosineTimeCondition, FlowTimestepCondition, NoiseCondition
from cascade_train.diffusion.scaling import LerpScaling, Scaling, VPScaling, per_sample
from cascade_train.diffusion.schedule import (
    CosineSchedule,
    DDPMSchedule,
    EDMSampleSchedule,
    NormalSchedule,
    RectifiedFlowSchedule,
    Schedule,
)
from cascade_train.diffusion.target import EDMTarget, EpsilonTarget, RectifiedFlowTarget, Target, VTarget, X0Target
from cascade_train.diffusion.times import Times
from cascade_train.diffusion.timestep_bias import TimestepBias
from cascade_train.errors import ConfigError, RunError
from cascade_train.options import check_above, check_within

SHORT_NAMES: Mapping[str, type[Target]] = MappingProxyType({"epsilon": EpsilonTarget, "v": VTarget, "x0": X0Target})
"""What `MinSNRGammaLossWeight` calls them."""

PREDICTION_TYPES: Mapping[type[Target], str] = MappingProxyType(
    {EpsilonTarget: "epsilon", VTarget: "v_prediction", X0Target: "sample"}
)
"""What diffusers' schedulers call the targets."""

_DDPM = ("beta_schedule", "beta_start", "beta_end", "num_train_timesteps", "rescale_betas_zero_snr")
_SAMPLED = {"clip_sample": False, "set_alpha_to_one": True, "timestep_spacing": "trailing", "steps_offset": 1}


@dataclass(frozen=True, kw_only=True)
class Diffused:
    """Noised latents and everything that belongs to them; all fp32, on the device of the latents.

    Attributes:
        noised: (B, C, H, W), what the network sees.
        target: (B, C, H, W), what it should predict.
        noise: (B, C, H, W), offset noise included.
        logsnr_B: (B,) noise level.
        timestep_ratio_B: (B,) noise condition, the network's noise input.
        loss_weight_B: (B,) weight of each sample's loss.
    """

    noised: Tensor
    target: Tensor
    noise: Tensor
    logsnr_B: Tensor
    timestep_ratio_B: Tensor
    loss_weight_B: Tensor


@dataclass(kw_only=True, eq=False)
class Objective(AdaptiveParts):
    """How latents are noised and a prediction is scored (Stable Cascade, gdf).

    Args:
        schedule: time to logSNR.
        scaling: logSNR to signal and noise scale.
        target: what the network predicts.
        noise_condition: logSNR to the network's noise input.
        loss_weight: logSNR to the weight of the loss.
        offset_noise: scale of the noise that is constant over a channel; 0 = off.
        shift: shift of the training noise level, 1 = none (see `Schedule`).
        base_latent_size: side of the latents that train with `shift` alone; others shift by their side over this
            one too (Hoogeboom et al. 2023, eq. 4), where H W latents have the side sqrt(H W). None = no such shift.
        timestep_bias: which times are drawn more often; None = none.
        noise: what is added to latents in training; None = independent standard normals.
        input_perturbation: scale of further noise in what the network sees, but not in its target (Ning et al. 2023,
            gamma, 0.1 there); 0 = off.
        distance: what the weighted loss is made of; None = the squared error.
        times: how training times are distributed; None = uniformly.

    Attributes:
        denoises: whether it trains a network to denoise latents.
    """

    denoises: ClassVar[bool] = True

    schedule: Schedule
    scaling: Scaling
    target: Target
    noise_condition: NoiseCondition
    loss_weight: LossWeight
    offset_noise: float
    shift: float
    base_latent_size: float | None = None
    timestep_bias: TimestepBias | None = None
    noise: Noise | None = None
    input_perturbation: float = 0.0
    distance: Distance | None = None
    times: Times | None = None

    def __post_init__(self) -> None:
        check_within("offset_noise", self.offset_noise, 0.0, 10.0)
        check_within("input_perturbation", self.input_perturbation, 0.0, 10.0)
        check_above("shift", self.shift, 0.0)
        if self.base_latent_size is not None:
            check_above("base_latent_size", self.base_latent_size, 0.0)
        if self.times is not None and isinstance(self.schedule, NormalSchedule):
            raise ConfigError(
                f"times: {type(self.schedule).__name__} has a distribution of its own: set schedule.mu and"
                " schedule.std, or choose another schedule, as objective=rectified_flow has for flows"
            )
        if self.times is not None and self.timestep_bias is not None and self.timestep_bias.strategy != "none":
            raise ConfigError(
                f"timestep_bias.strategy={self.timestep_bias.strategy} favours some of uniform times, and times has"
                " others: choose one of them"
            )
        zero_snr = isinstance(self.schedule, DDPMSchedule) and self.schedule.rescale_betas_zero_snr
        if zero_snr and isinstance(self.target, EpsilonTarget):
            raise ConfigError(
                "schedule.rescale_betas_zero_snr=true: where the latents are noise alone, predicting it teaches "
                "nothing; choose a target of velocity, such as objective=ddpm_v, or set it to false"
            )
        if isinstance(self.loss_weight, MinSNRGammaLossWeight):
            named = self.loss_weight.target
            ours = next((name for name, kind in SHORT_NAMES.items() if isinstance(self.target, kind)), named)
            if named != ours:
                raise ConfigError(
                    f"loss_weight.target={named}: the weight is written for another target than "
                    f"{type(self.target).__name__}, what the network predicts; set loss_weight.target={ours}"
                )

    def draw_noise(self, generators: Sequence[torch.Generator], shape: tuple[int, int, int]) -> Tensor:
        """Draw training noise, (B, C, H, W) fp32 on the host; see `Noise.draw`."""
        return (PlainNoise() if self.noise is None else self.noise).draw(generators, shape)

    def diffuse(
        self,
        x0_BCHW: Tensor,
        noise_BCHW: Tensor,
        u_B: Tensor,
        offset_BC11: Tensor | None = None,
        perturbation_BCHW: Tensor | None = None,
    ) -> Diffused:
        """Add noise to clean latents, at the levels chosen by `u_B`, (B,) uniform in [0, 1).

        Latents and noise, standard normal, are (B, C, H, W); `offset_BC11` (B, C, 1, 1), standard normal, is needed
        (RunError) where `offset_noise` is not 0, and `perturbation_BCHW` (B, C, H, W) adds `input_perturbation`.
        """
        if self.offset_noise and offset_BC11 is None:
            raise RunError(f"offset_noise={self.offset_noise} needs normals of shape (B, C, 1, 1); pass them")
        u_B = u_B if self.times is None else self.times(u_B)
        u_B = u_B if self.timestep_bias is None else self.timestep_bias(u_B)
        logsnr_B = self.schedule.sample(u_B, shift=self.shift_for(*x0_BCHW.shape[-2:]))
        diffused = self.diffuse_at(x0_BCHW, noise_BCHW, logsnr_B, offset_BC11)
        if perturbation_BCHW is None:
            return diffused
        b_B111 = self._scales(logsnr_B)[1]
        return replace(diffused, noised=diffused.noised + b_B111 * self.input_perturbation * perturbation_BCHW)

    def shift_for(self, height: int, width: int) -> float:
        """Shift of training latents of this size."""
        if self.base_latent_size is None:
            return self.shift
        return self.shift * math.sqrt(height * width) / self.base_latent_size

    def diffuse_at(
        self, x0_BCHW: Tensor, noise_BCHW: Tensor, logsnr_B: Tensor, offset_BC11: Tensor | None = None
    ) -> Diffused:
        """Add noise at given levels, (B,) logSNR, as validation does; without normals no offset noise is added."""
        x0_BCHW, noise_BCHW, logsnr_B = x0_BCHW.float(), noise_BCHW.float(), logsnr_B.float()
        if offset_BC11 is not None:
            noise_BCHW = noise_BCHW + self.offset_noise * offset_BC11.float()
        a_B111, b_B111 = self._scales(logsnr_B)
        return Diffused(
            noised=a_B111 * x0_BCHW + b_B111 * noise_BCHW,
            target=self.target(x0_BCHW, noise_BCHW, a_B111, b_B111),
            noise=noise_BCHW,
            logsnr_B=logsnr_B,
            timestep_ratio_B=self.noise_condition(logsnr_B),
            loss_weight_B=self.loss_weight(logsnr_B),
        )

    def x0(self, pred_BCHW: Tensor, noised_BCHW: Tensor, logsnr_B: Tensor) -> Tensor:
        """Clean latents, (B, C, H, W) fp32, that a prediction implies."""
        return self.target.x0(pred_BCHW.float(), noised_BCHW.float(), *self._scales(logsnr_B))

    def predicted_noise(self, pred_BCHW: Tensor, noised_BCHW: Tensor, logsnr_B: Tensor) -> Tensor:
        """Noise, (B, C, H, W) fp32, that a prediction implies."""
        return self.target.noise(pred_BCHW.float(), noised_BCHW.float(), *self._scales(logsnr_B))

    def loss(self, pred_BCHW: Tensor, diffused: Diffused, mask_B1HW: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weighted loss and the unweighted mean squared error, (B,) fp32 each, of a prediction (B, C, H, W).

        The weighted loss is of the `distance`. A mask (B, 1, H, W) fp32 in [0, 1] weights each place, see
        `masked_mean`.
        """

        def mean(value_BCHW: Tensor) -> Tensor:
            return value_BCHW.mean(dim=(1, 2, 3)) if mask_B1HW is None else masked_mean(value_BCHW, mask_B1HW)

        error_BCHW = pred_BCHW.float() - diffused.target
        loss_raw_B = mean(error_BCHW.square())
        loss_B = loss_raw_B if self.distance is None else mean(self.distance(error_BCHW, diffused.logsnr_B))
        return loss_B * diffused.loss_weight_B, loss_raw_B

    def scheduler_config(self) -> dict[str, Any] | None:
        """Configuration, with `_class_name`, of diffusers' scheduler that samples what this trains, or None.

        With DDIM and as many steps, a divisor of the timesteps, its samples are those of `sample` with "ddim".
        """
        schedule, target, condition = self.schedule, self.target, self.noise_condition
        if isinstance(schedule, DDPMSchedule) and type(target) in PREDICTION_TYPES:
            keys = {"prediction_type": PREDICTION_TYPES[type(target)], **_SAMPLED}
            return {"_class_name": "DDIMScheduler", **{key: getattr(schedule, key) for key in _DDPM}, **keys}
        if isinstance(schedule, EDMSampleSchedule) and isinstance(target, EDMTarget):
            low, high = schedule.sigma_range
            levels = {"sigma_min": low, "sigma_max": high, "sigma_data": target.sigma_data, "rho": schedule.p}
            return {"_class_name": "EDMEulerScheduler", **levels, "prediction_type": "epsilon"}
        line = isinstance(schedule, RectifiedFlowSchedule) and isinstance(self.scaling, LerpScaling)
        if line and isinstance(target, RectifiedFlowTarget) and isinstance(condition, FlowTimestepCondition):
            levels = {"num_train_timesteps": condition.num_train_timesteps, "shift": schedule.shift}
            return {"_class_name": "FlowMatchEulerDiscreteScheduler", **levels}
        predicts_noise = type(target) is EpsilonTarget and isinstance(self.scaling, VPScaling)
        if predicts_noise and isinstance(schedule, CosineSchedule) and condition == CosineTimeCondition(s=schedule.s):
            return {"_class_name": "DDPMWuerstchenScheduler", "s": schedule.s}
        return None

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; a RunError if the state belongs to another objective."""
        if state.keys() != self.state_dict().keys():
            raise RunError(
                f"the saved objective has state {sorted(state)}, this one {sorted(self.state_dict())}; "
                "resume with the objective that the run was started with"
            )
        super().load_state_dict(state)

    def _parts(self) -> dict[str, Adaptive]:
        return {"schedule": self.schedule, "loss_weight": self.loss_weight}

    def _scales(self, logsnr_B: Tensor) -> tuple[Tensor, Tensor]:
        a_B, b_B = self.scaling(logsnr_B.float())
        return per_sample(a_B), per_sample(b_B)


def masked_mean(value_BCHW: Tensor, mask_B1HW: Tensor) -> Tensor:
    """(B,) mean over C, H and W, weighted by a mask in [0, 1].

    Masks that sum to less than one place count as one: an empty mask gives 0.
    """
    kept_B = mask_B1HW.sum(dim=(1, 2, 3)).clamp(min=1.0)
    return (value_BCHW * mask_B1HW).sum(dim=(1, 2, 3)) / (kept_B * value_BCHW.shape[1])
