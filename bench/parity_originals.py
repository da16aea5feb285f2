"""The original's diffusion classes by name, and how each is written with ours.

Only what a reference case needs to be replayed; docs/differences.md says what differs and why.
"""

from __future__ import annotations

from typing import Any

from bench import parity_schedules
from cascade_train.diffusion import loss_weight, noise_condition, scaling, target
from cascade_train.diffusion import schedule as schedules
from cascade_train.diffusion.objective import Objective

CLAMP = [1e-4, 0.9999]
NAMES: dict[str, tuple[type, list[str], dict[str, Any]]] = {
    "CosineSchedule": (schedules.CosineSchedule, ["s"], {"s": 0.008, "clamp_range": CLAMP}),
    "CosineSchedule2": (parity_schedules.CosineLogSNRSchedule, ["logsnr_range"], {"logsnr_range": [-15, 15]}),
    "SqrtSchedule": (parity_schedules.SqrtSchedule, ["s"], {"s": 1e-4, "clamp_range": CLAMP}),
    "RectifiedFlowsSchedule": (schedules.RectifiedFlowSchedule, ["logsnr_range"], {"logsnr_range": [-15, 15]}),
    "EDMSampleSchedule": (schedules.EDMSampleSchedule, ["sigma_range", "p"], {"sigma_range": [0.002, 80], "p": 7}),
    "EDMTrainSchedule": (
        schedules.EDMTrainSchedule,
        ["mu", "std"],
        {"sigma_range": [0.002, 80], "p": 7, "mu": -1.2, "std": 1.2},
    ),
    "LinearSchedule": (parity_schedules.LinearSchedule, ["logsnr_range"], {"logsnr_range": [-10, 10]}),
    "StableDiffusionSchedule": (
        schedules.ScaledLinearSchedule,
        ["linear_range", "total_steps"],
        {"linear_range": [0.00085, 0.012], "total_steps": 1000},
    ),
    "InterpolatedSchedule": (
        parity_schedules.InterpolatedSchedule,
        ["first", "second", "shifts"],
        {"shifts": [1.0, 1.0]},
    ),
    "AdaptiveTrainSchedule": (
        parity_schedules.AdaptiveTrainSchedule,
        ["logsnr_range", "buckets", "min_probs"],
        {"logsnr_range": [-10, 10], "buckets": 100, "min_probs": 0.0, "duplicates": "last", "outside": "first"},
    ),
    "CosineTNoiseCond": (noise_condition.CosineTimeCondition, ["s", "clamp_range"], {"s": 0.008}),
    "EDMNoiseCond": (noise_condition.EDMCondition, [], {}),
    "SigmoidNoiseCond": (noise_condition.SigmoidCondition, [], {}),
    "LogSNRNoiseCond": (noise_condition.LogSNRCondition, [], {}),
    "EDMSigmaNoiseCond": (noise_condition.EDMSigmaCondition, ["sigma_data"], {"sigma_data": 1.0}),
    "RectifiedFlowsNoiseCond": (noise_condition.RectifiedFlowCondition, [], {}),
    "StableDiffusionNoiseCond": (
        noise_condition.ScaledLinearCondition,
        ["linear_range", "total_steps"],
        {"linear_range": [0.00085, 0.012], "total_steps": 1000},
    ),
    "DiscreteNoiseCond": (
        noise_condition.DiscreteCondition,
        ["condition", "steps", "continuous_range"],
        {"steps": 1000, "continuous_range": [0, 1]},
    ),
    "ConstantLossWeight": (loss_weight.ConstantLossWeight, ["v"], {"v": 1.0}),
    "SNRLossWeight": (loss_weight.SNRLossWeight, [], {}),
    "P2LossWeight": (loss_weight.P2LossWeight, ["k", "gamma", "s"], {"k": 1.0, "gamma": 1.0, "s": 1.0}),
    "SNRPlusOneLossWeight": (loss_weight.SNRPlusOneLossWeight, [], {}),
    "MinSNRLossWeight": (loss_weight.MinSNRLossWeight, ["max_snr"], {"max_snr": 5.0}),
    "MinSNRPlusOneLossWeight": (loss_weight.MinSNRPlusOneLossWeight, ["max_snr"], {"max_snr": 5.0}),
    "TruncatedSNRLossWeight": (loss_weight.TruncatedSNRLossWeight, ["min_snr"], {"min_snr": 1.0}),
    "SechLossWeight": (loss_weight.SechLossWeight, ["div"], {"div": 2.0}),
    "DebiasedLossWeight": (loss_weight.DebiasedLossWeight, [], {}),
    "SigmoidLossWeight": (loss_weight.SigmoidLossWeight, ["s"], {"s": 1.0}),
    "ComposedLossWeight": (loss_weight.ComposedLossWeight, ["div", "mul"], {"div": [], "mul": []}),
    "AdaptiveLossWeight": (
        loss_weight.AdaptiveLossWeight,
        ["logsnr_range", "buckets", "weight_range"],
        {"logsnr_range": [-10, 10], "buckets": 300, "weight_range": [1e-7, 1e7], "duplicates": "last"},
    ),
    "VPScaler": (scaling.VPScaling, [], {}),
    "LERPScaler": (scaling.LerpScaling, [], {}),
    "EpsilonTarget": (target.EpsilonTarget, [], {}),
    "X0Target": (target.X0Target, [], {}),
    "VTarget": (target.VTarget, [], {}),
    "RectifiedFlowsTarget": (target.RectifiedFlowTarget, [], {}),
}
"""Original class -> ours, names of its positional arguments, its defaults."""


def build(spec: Any, **extra: Any) -> Any:
    """Build ours from a case's {"cls", "pos", "kw"} description, nested ones too."""
    if isinstance(spec, list):
        return [build(part) for part in spec]
    if not isinstance(spec, dict):
        return spec
    cls, positional, defaults = NAMES[spec["cls"]]
    given = _as_ours(spec["cls"], dict(spec["kw"]))
    given |= dict(zip(positional, spec["pos"], strict=False))
    return cls(**defaults | {key: build(value) for key, value in given.items()} | extra)


def _as_ours(name: str, given: dict[str, Any]) -> dict[str, Any]:
    if name == "CosineTNoiseCond":  # the original ignores this keyword
        given.pop("clamp_range", None)
    if name == "EDMTrainSchedule":  # the original has the other sign
        given["mu"] = -given.get("mu", -1.2)
    if name == "ComposedLossWeight":
        given = {side: parts if isinstance(parts, list) else [parts] for side, parts in given.items()}
    return given


def build_objective(
    spec: dict[str, Any], *, shift: float = 1.0, loss_shift: float = 1.0, stretch: Any = None
) -> Objective:
    """Build an objective from a case's description of the original's GDF object."""
    schedule, scale = build(spec["schedule"]), build(spec["input_scaler"])
    return Objective(
        schedule=schedule,
        scaling=scale if stretch is None else scaling.StretchedScaling(scaling=scale, schedule=schedule, **stretch),
        target=build(spec["target"]),
        noise_condition=build(spec["noise_cond"]),
        loss_weight=build(spec["loss_weight"], shift=loss_shift),
        offset_noise=spec["offset_noise"],
        shift=shift,
    )
