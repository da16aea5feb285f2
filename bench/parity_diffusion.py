"""Cases of the diffusion maths (gdf_* and adaptive_loss), run on our code."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from bench import parity_originals as originals
from bench.parity_case import NotCoveredError, Outcome, Variant, fact, recorded
from cascade_train.diffusion.noise import PyramidNoise
from cascade_train.diffusion.sampler import SampleStep, ddim_step, sample
from cascade_train.diffusion.scaling import StretchedScaling, per_sample

CANCELLED = (
    "logSNR within 0.01 of 0 is left out: the original solves a quadratic equation in fp32, whose terms cancel there"
)
CALM = 0.01
"""Distance of logSNR from 0 below which the original's quadratic equation loses more than its cases allow."""


def schedules(variant: Variant) -> Outcome:
    """Run gdf_schedules: logSNR of times, of training draws, or buckets that learn, and the limits."""
    schedule = originals.build(variant.args["schedule"])
    if "updates" in variant.args:
        return _learning_schedule(variant, schedule)
    if "random_calls" in variant.args:
        calls = zip(variant.args["random_calls"], _uniform(variant, schedule), strict=True)
        return Outcome({call["out"]: schedule.sample(u_B, shift=call["shift"]) for call, u_B in calls})
    given = variant.inputs
    outcome = Outcome({c["out"]: schedule(given[c["t"]], shift=c["shift"]) for c in variant.args["calls"]})
    if "limits" in variant.facts:
        ours, theirs = schedule.limits or (None, None), variant.facts["limits"] or (None, None)
        outcome.facts = [fact(f"limits.{i}", a, b, 2e-3) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    return outcome


def _learning_schedule(variant: Variant, schedule: Any) -> Outcome:
    got = {}
    for k in range(variant.args["updates"]):
        schedule.after_step(variant.inputs[f"logSNR.{k}"], variant.inputs[f"loss.{k}"])
        got[f"bucket_probs.{k}"] = schedule.state_dict()["bucket_loss"]
    return Outcome(got)


def _uniform(variant: Variant, schedule: Any) -> list[Tensor]:
    """Return one uniform number per sample that stands for what the original drew."""
    name = variant.args["schedule"]["cls"]
    if name == "EDMTrainSchedule":
        return [1 - torch.special.ndtr(n.double()) for n in variant.draws]
    if name == "AdaptiveTrainSchedule":
        pairs = zip(variant.draws[::2], variant.draws[1::2], strict=True)
        return [(bucket + place) / schedule.buckets for bucket, place in pairs]
    return variant.draws


def noise_conditions(variant: Variant) -> Outcome:
    """Run gdf_noise_conds."""
    spec, logsnr_B = variant.args["noise_cond"], variant.inputs["logSNR"]
    got = originals.build(spec)(logsnr_B)
    is_fp32 = fact("cond is fp32", float(got.dtype == torch.float32), 1.0, 0.0)
    return Outcome({"cond": got}, masks=_mask(spec, logsnr_B, {"cond"}), facts=[is_fp32], notes=_notes(spec, logsnr_B))


def loss_weights(variant: Variant) -> Outcome:
    """Run gdf_loss_weights."""
    spec, logsnr_B = variant.args["loss_weight"], variant.inputs["logSNR"]
    return Outcome({c["out"]: originals.build(spec, **c["kw"])(logsnr_B) for c in variant.args["calls"]})


def scalers_and_targets(variant: Variant) -> Outcome:
    """Run gdf_scalers_targets: a and b, and four targets with their inverses."""
    given, scaling = variant.inputs, _scaling(variant.args)
    facts = []
    if isinstance(scaling, StretchedScaling):
        # At logSNR = -15 rounding moves the original's straight line by 7e-6.
        allowed = 1e-5 if variant.args["scaler"]["cls"] == "LERPScaler" else 2e-6
        ends = zip(scaling.ends, variant.facts["stretched_limits"], strict=True)
        facts = [fact(f"stretched_limits.{i}", a, b, allowed) for i, (a, b) in enumerate(ends)]
        vars(scaling)["ends"] = tuple(variant.facts["stretched_limits"])  # errors of the ends count once
    a_B, b_B = scaling(given["logSNR"])
    a, b = per_sample(a_B), per_sample(b_B)
    got = {"a": a_B, "b": b_B, "noised": a * given["x0"] + b * given["epsilon"]}
    for name in ("EpsilonTarget", "X0Target", "VTarget", "RectifiedFlowsTarget"):
        got |= _target(name, given, got["noised"], a, b)
    spec = variant.args["scaler"]
    masks = _mask(spec, given["logSNR"], set(got))
    masks = {name: per_sample(mask) if got[name].dim() > 1 else mask for name, mask in masks.items()}
    return Outcome(got, masks=masks, facts=facts, notes=_notes(spec, given["logSNR"]))


def _target(name: str, given: dict[str, Tensor], noised: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    target = originals.build({"cls": name, "pos": [], "kw": {}})
    got = {f"{name}.target": target(given["x0"], given["epsilon"], a, b)}
    # The original's rectified-flow inverses forget to divide by a + b.
    undivided = a + b if name == "RectifiedFlowsTarget" else 1
    for of, pred in (("target", got[f"{name}.target"]), ("pred", given["pred"])):
        got[f"{name}.x0_of_{of}"] = target.x0(pred, noised, a, b) * undivided
        got[f"{name}.epsilon_of_{of}"] = target.noise(pred, noised, a, b) * undivided
    return got


def _scaling(args: dict[str, Any]) -> Any:
    scaling = originals.build(args["scaler"])
    if "limits" not in args:
        return scaling
    schedule = originals.build(args["limits"]["schedule"])
    return StretchedScaling(scaling=scaling, schedule=schedule, **args["limits"]["kw"])


def _mask(spec: dict[str, Any], logsnr_B: Tensor, names: set[str]) -> dict[str, Tensor]:
    return dict.fromkeys(names, logsnr_B.abs() >= CALM) if _notes(spec, logsnr_B) else {}


def _notes(spec: dict[str, Any], logsnr_B: Tensor) -> list[str]:
    near = bool((logsnr_B.abs() < CALM).any())
    return [CANCELLED] if near and spec["cls"] in ("LERPScaler", "RectifiedFlowsNoiseCond") else []


def diffuse(variant: Variant) -> Outcome:
    """Run gdf_diffuse: noise a latent, score a prediction."""
    given, args = variant.inputs, variant.args
    shift = args.get("shift", 1.0)
    objective = originals.build_objective(
        args["gdf"], shift=shift, loss_shift=args.get("loss_shift", 1.0), stretch=args.get("setup_limits")
    )
    if "t" in given:
        logsnr_B = objective.schedule(given["t"], shift=shift)
        diffused = objective.diffuse_at(given["x0"], given["epsilon"], logsnr_B, given.get("offset"))
    else:
        (noise,), (u_B,), offset = (recorded(given, kind) for kind in ("randn_like", "rand", "randn"))
        diffused = objective.diffuse(given["x0"], noise, u_B, offset[0] if offset else None)
    got = {
        "noised": diffused.noised,
        "epsilon_used": diffused.noise,
        "target": diffused.target,
        "logSNR": diffused.logsnr_B,
        "noise_cond": diffused.timestep_ratio_B,
        "loss_weight": diffused.loss_weight_B,
        "undiffuse.x0": objective.x0(given["pred"], diffused.noised, diffused.logsnr_B),
        "undiffuse.epsilon": objective.predicted_noise(given["pred"], diffused.noised, diffused.logsnr_B),
    }
    return Outcome(got)


def samplers(variant: Variant) -> Outcome:
    """Run gdf_samplers: every step of a sampler on the case's toy network."""
    given, kw = variant.inputs, dict(variant.args["kw"])
    steps: list[SampleStep] = []
    sample(
        functools.partial(_toy, given),
        objective=originals.build_objective(variant.args["gdf"]),
        noise=iter(variant.draws).__next__,
        steps=kw["timesteps"],
        shift=kw.get("shift", 1.0),
        guidance_scale=kw["cfg"],
        guidance_rescale=kw.get("cfg_rho", 0.7),
        rescale_over="batch",
        t_start=kw.get("t_start", 1.0),
        t_end=kw.get("t_end", 0.0),
        x_init=given.get("x_init"),
        sampler=_update(variant.args["sampler"], **kw.get("sampler_params", {})),
        schedule=originals.build(kw["schedule"]) if "schedule" in kw else None,
        on_step=steps.append,
    )
    parts = ("x0", "x", "pred")
    return Outcome({f"step.{i:02d}.{part}": getattr(step, part) for i, step in enumerate(steps) for part in parts})


def _update(name: str, **options: float) -> Any:
    return functools.partial(ddim_step, **options) if options else name.removesuffix("Sampler").lower()


def _toy(given: dict[str, Tensor], x: Tensor, r_B: Tensor) -> tuple[Tensor, Tensor]:
    """Run the case's toy network, with and without its condition."""
    mixed = torch.einsum("oc,bchw->bohw", given["toy.M"], x) * per_sample((r_B * (math.pi / 2)).sin())
    extra = sum((value for name, value in given.items() if name.startswith("extra.")), torch.zeros(()))
    alone = mixed + given["toy.v"][None, :, None, None] * per_sample(r_B) + extra
    uncond = alone + given["c_uncond"][:, :, None, None] if "c_uncond" in given else alone
    return alone + given["c"][:, :, None, None], uncond


def adaptive_loss(variant: Variant) -> Outcome:
    """Run adaptive_loss: weights before each update, buckets after it, and the weights at the end."""
    given, args, got = variant.inputs, variant.args, {}
    spec = {"cls": "AdaptiveLossWeight", "pos": [], "kw": args["ctor"]}
    weight = originals.build(spec, **args.get("update_kw", {}))
    shifted = originals.build(spec, shift=2.0)
    for k in range(args["updates"]):
        logsnr_G, loss_G = given[f"logSNR.{k:02d}"], given[f"loss.{k:02d}"]
        got[f"weight_before.{k:02d}"] = weight(logsnr_G)
        weight.after_step(logsnr_G, loss_G)
        got[f"bucket_losses.{k:02d}"] = weight.state_dict()["bucket_loss"]
    shifted.load_state_dict(weight.state_dict())
    got |= {"weight_grid": weight(given["grid"]), "weight_grid_shift2": shifted(given["grid"])}
    got["bucket_ranges"] = torch.linspace(*weight.logsnr_range, weight.buckets - 1)
    return Outcome(got)


def pyramid_noise(variant: Variant) -> Outcome:
    """Run pyramid_noise: the recorded normals of every level, mixed."""
    given = dict(variant.args["kw"])
    noise = PyramidNoise(
        levels=given.pop("levels", 10),
        discount=given.pop("multiplier", 0.75),
        side_range=given.pop("size_range", None),
        interpolation=given.pop("scale_mode", "nearest"),
        square_grids=True,
    )
    if given:
        raise NotCoveredError(f"{', '.join(given)}: no such option of ours")
    return Outcome({"y": noise.mix(variant.inputs["epsilon"], recorded(variant.inputs, "randn"))})
