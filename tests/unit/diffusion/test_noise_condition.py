from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cascade_train.diffusion.noise_condition import (
    CosineTimeCondition,
    DDPMTimestepCondition,
    DiscreteCondition,
    EDMCondition,
    EDMSigmaCondition,
    FlowTimestepCondition,
    LogSNRCondition,
    NoiseCondition,
    RectifiedFlowCondition,
    ScaledLinearCondition,
    SigmoidCondition,
)
from cascade_train.diffusion.scaling import LerpScaling
from cascade_train.diffusion.schedule import CosineSchedule, DDPMSchedule, ScaledLinearSchedule
from cascade_train.errors import ConfigError

DDPM = DDPMSchedule(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, num_train_timesteps=1000)
COSINE = CosineTimeCondition(s=0.008)
CONDITIONS: tuple[NoiseCondition, ...] = (
    COSINE,
    EDMCondition(),
    EDMSigmaCondition(sigma_data=0.5),
    SigmoidCondition(),
    LogSNRCondition(),
    RectifiedFlowCondition(),
    FlowTimestepCondition(num_train_timesteps=1000),
    ScaledLinearCondition(linear_range=[0.00085, 0.012], total_steps=1000),
    DDPMTimestepCondition(schedule=DDPM),
    DiscreteCondition(condition=COSINE, steps=1000, continuous_range=[0.0, 1.0]),
)
LOGSNR = torch.linspace(-12, 12, 49)


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda c: type(c).__name__)
def test_a_condition_is_monotone_finite_and_fp32(condition: NoiseCondition) -> None:
    value_B = condition(LOGSNR.double())
    assert value_B.dtype == torch.float32
    assert value_B.shape == LOGSNR.shape
    assert value_B.isfinite().all()
    step = value_B.diff()
    assert (step <= 1e-6).all() or (step >= -1e-6).all()


def test_cosine_time_is_the_inverse_of_the_cosine_schedule() -> None:
    t = torch.linspace(0.02, 0.98, 49)
    schedule = CosineSchedule(s=0.008, clamp_range=[1e-4, 0.9999])
    torch.testing.assert_close(COSINE(schedule(t)), t, atol=2e-5, rtol=0)


def test_cosine_time_of_the_schedules_ends_stays_inside() -> None:
    schedule = CosineSchedule(s=0.008, clamp_range=[1e-4, 0.9999])
    torch.testing.assert_close(
        COSINE(schedule(torch.tensor([0.0, 1.0]))), torch.tensor([0.0023, 0.9936]), atol=5e-5, rtol=0
    )


@pytest.mark.parametrize("options", [
    {"linear_range": [0.00085, 0.012], "total_steps": 1000},
    {"linear_range": [0.05, 0.5], "total_steps": 10},  # whose intervals differ
])  # fmt: skip
def test_stable_diffusion_time_is_the_inverse_of_its_schedule(options) -> None:
    t = torch.linspace(0, 1, 51)
    again = ScaledLinearCondition(**options)(ScaledLinearSchedule(**options)(t))
    torch.testing.assert_close(again, t, atol=1e-4, rtol=0)


def test_rectified_flow_condition_is_the_signal_scale() -> None:
    torch.testing.assert_close(RectifiedFlowCondition()(LOGSNR), LerpScaling()(LOGSNR)[0])


def test_flow_timesteps_are_the_noise_scale_in_any_unit() -> None:
    for steps in (1, 1000):
        found = FlowTimestepCondition(num_train_timesteps=steps)(LOGSNR)
        torch.testing.assert_close(found, steps * LerpScaling()(LOGSNR)[1])
    with pytest.raises(ConfigError, match="num_train_timesteps"):
        FlowTimestepCondition(num_train_timesteps=0)


def test_edm_condition_is_a_quarter_of_log_sigma() -> None:
    log_sigma_B = EDMSigmaCondition(sigma_data=1.0)(LOGSNR).log()
    torch.testing.assert_close(EDMCondition()(LOGSNR), log_sigma_B / 4)


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda c: type(c).__name__)
def test_a_shift_looks_up_the_condition_at_less_noise(condition: NoiseCondition) -> None:
    torch.testing.assert_close(replace(condition, shift=2.0)(LOGSNR), condition(LOGSNR + 2 * math.log(2)))


def test_a_clamp_bounds_the_value() -> None:
    assert EDMCondition(clamp_range=[-1.0, 1.0])(LOGSNR).aminmax() == (-1.0, 1.0)
    low, high = CosineTimeCondition(s=0.008, clamp_range=[0.25, 0.75])(LOGSNR).aminmax()
    assert low >= 0.25
    assert high <= 0.75


def test_discrete_steps_are_cut_towards_zero() -> None:
    condition = DiscreteCondition(condition=LogSNRCondition(), steps=10, continuous_range=[0.0, 1.0])
    assert condition(torch.tensor([0.0, 0.19, 0.95, -0.19])).tolist() == [0.0, 1.0, 9.0, -1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EDMCondition(clamp_range=[1.0, 0.0]), "clamp_range=.*low < high"),
        (lambda: ScaledLinearCondition(linear_range=[0.2, 0.1], total_steps=10), "linear_range=.*low < high"),
        (lambda: replace(CONDITIONS[-1], steps=0), "steps=0 must be greater"),
    ],
)
def test_values_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
