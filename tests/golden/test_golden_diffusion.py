"""Diffusion maths against the original's numbers (cases gdf_* and adaptive_loss)."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cascade_train.diffusion.objective import Diffused
from cascade_train.diffusion.sampler import SampleStep, ddim_step, sample
from cascade_train.diffusion.scaling import StretchedScaling, per_sample
from tests.golden import originals


class Golden:
    """A test class whose tests run per variant of `case`; subclasses may take only some."""

    case: str

    @classmethod
    def takes(cls, variant: Any) -> bool:
        return True


class TestSchedules(Golden):
    case = "gdf_schedules"

    @classmethod
    def takes(cls, variant: Any) -> bool:
        return "calls" in variant.args

    def test_logsnr_of_time_is_the_originals(self, variant: Any) -> None:
        schedule = originals.build(variant.args["schedule"])
        given = variant.inputs
        variant.check({c["out"]: schedule(given[c["t"]], shift=c["shift"]) for c in variant.args["calls"]})

    def test_limits_are_the_originals(self, variant: Any) -> None:
        schedule = originals.build(variant.args["schedule"])
        expected = variant.facts["limits"]
        assert schedule.limits == (None if expected is None else pytest.approx(expected, abs=2e-3))

    def test_all_21_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 21


class TestTrainingDraws(Golden):
    case = "gdf_schedules"

    @classmethod
    def takes(cls, variant: Any) -> bool:
        return "random_calls" in variant.args

    def test_logsnr_of_recorded_draws_is_the_originals(self, variant: Any) -> None:
        schedule = originals.build(variant.args["schedule"])
        uniform = self._uniform(variant, schedule)
        calls = variant.args["random_calls"]
        variant.check(
            {call["out"]: schedule.sample(u_B, shift=call["shift"]) for call, u_B in zip(calls, uniform, strict=True)}
        )

    def _uniform(self, variant: Any, schedule: Any) -> list[Tensor]:
        """One uniform number per sample that stands for what the original drew."""
        name = variant.args["schedule"]["cls"]
        if name == "EDMTrainSchedule":
            return [1 - torch.special.ndtr(n.double()) for n in variant.draws]
        if name == "AdaptiveTrainSchedule":
            bucket, place = variant.draws
            return [(bucket + place) / schedule.buckets]
        return variant.draws

    def test_all_9_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 9


class TestAdaptiveSchedule(Golden):
    case = "gdf_schedules"

    @classmethod
    def takes(cls, variant: Any) -> bool:
        return "updates" in variant.args

    def test_buckets_learn_as_the_originals(self, variant: Any) -> None:
        schedule, given, got = originals.build(variant.args["schedule"]), variant.inputs, {}
        for k in range(variant.args["updates"]):
            schedule.after_step(given[f"logSNR.{k}"], given[f"loss.{k}"])
            got[f"bucket_probs.{k}"] = schedule.state_dict()["bucket_loss"]
        variant.check(got)

    def test_the_variant_was_found(self, variant_count: int) -> None:
        assert variant_count == 1


class TestNoiseConditions(Golden):
    case = "gdf_noise_conds"

    def test_condition_is_the_originals(self, variant: Any) -> None:
        logsnr_B = variant.inputs["logSNR"]
        got = originals.build(variant.args["noise_cond"])(logsnr_B)
        assert got.dtype == torch.float32
        variant.check({"cond": got}, _rows(variant.args["noise_cond"]["cls"], logsnr_B))

    def test_all_15_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 15


class TestLossWeights(Golden):
    case = "gdf_loss_weights"

    def test_weight_is_the_originals(self, variant: Any) -> None:
        logsnr_B = variant.inputs["logSNR"]
        variant.check(
            {c["out"]: originals.build(variant.args["loss_weight"], **c["kw"])(logsnr_B) for c in variant.args["calls"]}
        )

    def test_all_19_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 19


class TestScalingsAndTargets(Golden):
    case = "gdf_scalers_targets"

    def test_scales_targets_and_inverses_are_the_originals(self, variant: Any) -> None:
        given = variant.inputs
        scaling = _scaling(variant.args)
        if isinstance(scaling, StretchedScaling):  # the ends have a test of their own
            vars(scaling)["ends"] = tuple(variant.facts["stretched_limits"])
        a_B, b_B = scaling(given["logSNR"])
        a, b = per_sample(a_B), per_sample(b_B)
        noised = a * given["x0"] + b * given["epsilon"]
        got = {"a": a_B, "b": b_B, "noised": noised}
        for name in ("EpsilonTarget", "X0Target", "VTarget", "RectifiedFlowsTarget"):
            got |= self._target(name, given, noised, a, b)
        variant.check(got, _rows(variant.args["scaler"]["cls"], given["logSNR"]))

    def _target(self, name: str, given: dict[str, Tensor], noised: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        target = originals.build({"cls": name, "pos": [], "kw": {}})
        got = {f"{name}.target": target(given["x0"], given["epsilon"], a, b)}
        # The original's rectified-flow inverses forget to divide by a + b.
        undivided = a + b if name == "RectifiedFlowsTarget" else 1
        for of, pred in (("target", got[f"{name}.target"]), ("pred", given["pred"])):
            got[f"{name}.x0_of_{of}"] = target.x0(pred, noised, a, b) * undivided
            got[f"{name}.epsilon_of_{of}"] = target.noise(pred, noised, a, b) * undivided
        return got

    def test_stretched_ends_are_the_originals(self, variant: Any) -> None:
        scaling = _scaling(variant.args)
        if isinstance(scaling, StretchedScaling):
            # At logSNR = -15 rounding moves the original's straight line by 7e-6.
            allowed = 1e-5 if variant.args["scaler"]["cls"] == "LERPScaler" else 2e-6
            assert scaling.ends == pytest.approx(variant.facts["stretched_limits"], abs=allowed)
        else:
            assert "stretched_limits" not in variant.facts

    def test_all_5_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 5


class TestDiffuse(Golden):
    case = "gdf_diffuse"

    def test_noised_target_condition_and_weight_are_the_originals(self, variant: Any) -> None:
        given, args = variant.inputs, variant.args
        shift = args.get("shift", 1.0)
        objective = originals.build_objective(
            args["gdf"], shift=shift, loss_shift=args.get("loss_shift", 1.0), stretch=args.get("setup_limits")
        )
        if "t" in given:
            logsnr_B = objective.schedule(given["t"], shift=shift)
            diffused = objective.diffuse_at(given["x0"], given["epsilon"], logsnr_B, given.get("offset"))
        else:
            noise, offset, u_B = variant.draws
            diffused = objective.diffuse(given["x0"], noise, u_B, offset)
        variant.check(self._as_case(diffused, objective, given["pred"]))

    def _as_case(self, diffused: Diffused, objective: Any, pred: Tensor) -> dict[str, Tensor]:
        return {
            "noised": diffused.noised,
            "epsilon_used": diffused.noise,
            "target": diffused.target,
            "logSNR": diffused.logsnr_B,
            "noise_cond": diffused.timestep_ratio_B,
            "loss_weight": diffused.loss_weight_B,
            "undiffuse.x0": objective.x0(pred, diffused.noised, diffused.logsnr_B),
            "undiffuse.epsilon": objective.noise(pred, diffused.noised, diffused.logsnr_B),
        }

    def test_all_8_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 8


class TestSamplers(Golden):
    case = "gdf_samplers"

    def test_every_step_is_the_originals(self, variant: Any) -> None:
        given, kw = variant.inputs, dict(variant.args["kw"])
        steps: list[SampleStep] = []
        sample(
            functools.partial(self._toy, given),
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
            sampler=self._update(variant.args["sampler"], **kw.get("sampler_params", {})),
            schedule=originals.build(kw["schedule"]) if "schedule" in kw else None,
            on_step=steps.append,
        )
        parts = ("x0", "x", "pred")
        variant.check({f"step.{i:02d}.{part}": getattr(step, part) for i, step in enumerate(steps) for part in parts})

    def _update(self, name: str, **options: float) -> Any:
        return functools.partial(ddim_step, **options) if options else name.removesuffix("Sampler").lower()

    def _toy(self, given: dict[str, Tensor], x: Tensor, r_B: Tensor) -> tuple[Tensor, Tensor]:
        """The case's toy network, with and without its condition."""
        mixed = torch.einsum("oc,bchw->bohw", given["toy.M"], x) * per_sample((r_B * (math.pi / 2)).sin())
        extra = sum((value for name, value in given.items() if name.startswith("extra.")), torch.zeros(()))
        alone = mixed + given["toy.v"][None, :, None, None] * per_sample(r_B) + extra
        uncond = alone + given["c_uncond"][:, :, None, None] if "c_uncond" in given else alone
        return alone + given["c"][:, :, None, None], uncond

    def test_all_13_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 13


class TestAdaptiveLoss(Golden):
    case = "adaptive_loss"

    def test_weights_and_buckets_follow_the_originals(self, variant: Any) -> None:
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
        variant.check(got)

    def test_all_3_variants_were_found(self, variant_count: int) -> None:
        assert variant_count == 3


def _scaling(args: dict[str, Any]) -> Any:
    scaling = originals.build(args["scaler"])
    if "limits" not in args:
        return scaling
    return StretchedScaling(
        scaling=scaling, schedule=originals.build(args["limits"]["schedule"]), **args["limits"]["kw"]
    )


def _rows(original: str, logsnr_B: Tensor) -> Tensor | slice:
    """Leave out logSNR = 0 exactly where the original's straight line is off by 1.6e-4 there (a guard)."""
    return logsnr_B != 0 if original in ("LERPScaler", "RectifiedFlowsNoiseCond") else slice(None)
