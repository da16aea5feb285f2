"""Diffusers' scheduler of an objective has its noise levels, or there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from cascade_train.diffusion.objective import Objective


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_flow_has_the_levels_and_timesteps_of_its_scheduler(build: Callable[..., Objective], shift: float) -> None:
    changed: dict[str, Any] = {"schedule": {"shift": shift}}
    objective = build("flow_matching", **changed)
    config = objective.scheduler_config()
    assert config is not None
    scheduler = getattr(diffusers, config.pop("_class_name"))(**config)
    t = torch.linspace(1, 0, 9)[:-1]
    scheduler.set_timesteps(sigmas=t.tolist())
    logsnr = objective.schedule(t)
    torch.testing.assert_close(objective.scaling(logsnr)[1], scheduler.sigmas[:-1], atol=1e-5, rtol=0.0)
    torch.testing.assert_close(objective.noise_condition(logsnr), scheduler.timesteps, atol=1e-2, rtol=0.0)


@pytest.mark.parametrize("s", [0.008, 0.02])
def test_noise_on_the_cosine_schedule_has_the_levels_of_its_scheduler(
    build: Callable[..., Objective], s: float
) -> None:
    changed: dict[str, Any] = {"schedule": {"s": s}, "noise_condition": {"s": s}}
    objective, t = build("gdf", **changed), torch.linspace(1, 0, 9)
    config = objective.scheduler_config()
    assert config is not None
    scheduler = getattr(diffusers, config.pop("_class_name"))(**config)
    a, b = objective.scaling(objective.schedule(t))
    torch.testing.assert_close(a**2, scheduler._alpha_cumprod(t, t.device), atol=1e-5, rtol=0.0)
    torch.testing.assert_close(a**2 + b**2, torch.ones(9))
    assert build("gdf", noise_condition={"s": 0.1}).scheduler_config() is None


@pytest.mark.parametrize("name", ["rectified_flow", "v", "x0"])
def test_other_objectives_of_the_cascade_have_no_scheduler(build: Callable[..., Objective], name: str) -> None:
    assert build(name).scheduler_config() is None
