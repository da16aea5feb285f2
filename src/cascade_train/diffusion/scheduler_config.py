"""Diffusers' schedulers that sample what an objective trains."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cascade_train.diffusion.noise_condition import FlowTimestepCondition
from cascade_train.diffusion.scaling import LerpScaling
from cascade_train.diffusion.schedule import DDPMSchedule, EDMSampleSchedule, RectifiedFlowSchedule
from cascade_train.diffusion.target import EDMTarget, EpsilonTarget, RectifiedFlowTarget, Target, VTarget, X0Target

if TYPE_CHECKING:
    from cascade_train.diffusion.objective import Objective

PREDICTION_TYPES: Mapping[type[Target], str] = MappingProxyType(
    {EpsilonTarget: "epsilon", VTarget: "v_prediction", X0Target: "sample"}
)
"""What diffusers' schedulers call the targets."""

_DDPM = ("beta_schedule", "beta_start", "beta_end", "num_train_timesteps", "rescale_betas_zero_snr")
_SAMPLED = {"clip_sample": False, "set_alpha_to_one": True, "timestep_spacing": "trailing", "steps_offset": 1}


def scheduler_config(objective: Objective) -> dict[str, Any] | None:
    """Return the configuration, with `_class_name`, of diffusers' scheduler for an objective; None = there is none."""
    schedule, target, condition = objective.schedule, objective.target, objective.noise_condition
    if isinstance(schedule, DDPMSchedule) and type(target) in PREDICTION_TYPES:
        found = {"prediction_type": PREDICTION_TYPES[type(target)], **_SAMPLED}
        return {"_class_name": "DDIMScheduler", **{key: getattr(schedule, key) for key in _DDPM}, **found}
    if isinstance(schedule, EDMSampleSchedule) and isinstance(target, EDMTarget):
        low, high = schedule.sigma_range
        levels = {"sigma_min": low, "sigma_max": high, "sigma_data": target.sigma_data, "rho": schedule.p}
        return {"_class_name": "EDMEulerScheduler", **levels, "prediction_type": "epsilon"}
    line = isinstance(schedule, RectifiedFlowSchedule) and isinstance(objective.scaling, LerpScaling)
    if line and isinstance(target, RectifiedFlowTarget) and isinstance(condition, FlowTimestepCondition):
        levels = {"num_train_timesteps": condition.num_train_timesteps, "shift": schedule.shift}
        return {"_class_name": "FlowMatchEulerDiscreteScheduler", **levels}
    return None
