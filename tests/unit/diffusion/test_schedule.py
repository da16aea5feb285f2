from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cascade_train.diffusion.schedule import (
    CosineSchedule,
    DDPMSchedule,
    EDMSampleSchedule,
    EDMTrainSchedule,
    LogitNormalSchedule,
    RectifiedFlowSchedule,
    ScaledLinearSchedule,
    Schedule,
    scaled_linear_variances,
)
from cascade_train.errors import ConfigError

COSINE = CosineSchedule(s=0.008, clamp_range=[1e-4, 0.9999])
SCHEDULES = {
    "cosine": COSINE,
    "cosine_norm": replace(COSINE, norm_instead=True),
    "rectified_flow": RectifiedFlowSchedule(logsnr_range=[-15.0, 15.0]),
    "edm_sample": EDMSampleSchedule(sigma_range=[0.002, 80.0], p=7.0),
    "edm_train": EDMTrainSchedule(sigma_range=[0.002, 80.0], p=7.0, mu=-1.2, std=1.2),
    "logit_normal": LogitNormalSchedule(logsnr_range=[-15.0, 15.0], mu=0.5, std=0.8),
    "stable_diffusion": ScaledLinearSchedule(linear_range=[0.00085, 0.012], total_steps=1000),
    "ddpm": DDPMSchedule(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, num_train_timesteps=1000),
}
T = torch.linspace(0, 1, 301)


@pytest.fixture(params=SCHEDULES.values(), ids=SCHEDULES.keys())
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return request.param


def test_logsnr_falls_as_time_goes_towards_noise(schedule: Schedule) -> None:
    step = schedule(T).diff()
    assert (step <= 0).all()
    assert (step < 0).float().mean() > 0.95


def test_ends_are_the_limits(schedule: Schedule) -> None:
    high, low = schedule(torch.tensor([0.0, 1.0])).tolist()
    assert schedule.limits == (pytest.approx(low), pytest.approx(high))


def test_time_outside_its_range_is_clamped(schedule: Schedule) -> None:
    torch.testing.assert_close(schedule(torch.tensor([-0.2, 1.3])), schedule(torch.tensor([0.0, 1.0])))


def test_a_calls_shift_moves_logsnr_inside_the_limits_only(schedule: Schedule) -> None:
    low, high = schedule.limits
    shifted = schedule(T, shift=2.0)
    torch.testing.assert_close(shifted, (schedule(T) - 2 * math.log(2)).clamp(low, high))


def test_a_schedules_own_shift_moves_its_limits_too(schedule: Schedule) -> None:
    shifted = replace(schedule, shift=2.0)
    torch.testing.assert_close(shifted(T), schedule(T) - 2 * math.log(2), atol=1e-5, rtol=1e-5)


def test_without_limits_a_shift_leaves_the_range(schedule: Schedule) -> None:
    free = replace(schedule, force_limits=False)
    assert free.limits is None
    torch.testing.assert_close(free(T, shift=4.0), schedule(T) - 2 * math.log(4))


def test_training_levels_stay_finite_for_every_uniform_number(schedule: Schedule) -> None:
    u_B = torch.tensor([0.0, 2**-24, 0.5, 1 - 2**-24])
    logsnr_B = schedule.sample(u_B)
    assert logsnr_B.dtype == torch.float32
    assert logsnr_B.isfinite().all()
    assert (logsnr_B.diff() >= 0).all()


def test_cosine_has_the_published_variance() -> None:
    t = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64)
    expected = (torch.cos((0.008 + t) / 1.008 * math.pi / 2) / math.cos(0.008 / 1.008 * math.pi / 2)) ** 2
    torch.testing.assert_close(COSINE(t.float()).sigmoid().double(), expected, atol=1e-6, rtol=1e-6)


def test_cosine_trains_at_t_between_a_thousandth_and_one() -> None:
    u_B = torch.tensor([0.0, 0.0005, 0.001, 0.4, 1 - 2**-24])
    torch.testing.assert_close(COSINE.sample(u_B), COSINE(torch.tensor([1.0, 1.0, 1.0, 0.601, 0.001])))


def test_discrete_steps_round_floats_and_index_with_integers() -> None:
    coarse = replace(COSINE, discrete_steps=5)
    expected = COSINE(torch.tensor([0.0, 0.25, 0.5, 1.0]))
    torch.testing.assert_close(coarse(torch.tensor([0.1, 0.3, 0.45, 0.9])), expected)
    torch.testing.assert_close(coarse(torch.tensor([0, 1, 2, 4])), expected)


def test_rectified_flow_is_the_ratio_of_the_two_ends() -> None:
    t = torch.tensor([0.1, 0.5, 0.8])
    expected = ((1 - t) / t) ** 2
    torch.testing.assert_close(SCHEDULES["rectified_flow"](t).exp(), expected)


def test_logit_normal_times_have_their_moments_and_the_shift_of_the_schedule() -> None:
    schedule, plain = (replace(SCHEDULES[name], shift=3.0) for name in ("logit_normal", "rectified_flow"))
    u_B = (torch.arange(20000) + 0.5) / 20000
    logit_B = schedule.sample(u_B) / -2 - math.log(3.0)
    assert float(logit_B.mean()) == pytest.approx(0.5, abs=1e-3)
    assert float(logit_B.std()) == pytest.approx(0.8, abs=1e-3)
    assert torch.equal(schedule(T), plain(T))


def test_edm_sampling_reaches_its_two_sigmas() -> None:
    sigma = (SCHEDULES["edm_sample"](torch.tensor([1.0, 0.0])) / -2).exp()
    torch.testing.assert_close(sigma, torch.tensor([80.0, 0.002]), rtol=1e-4, atol=0)


def test_edm_training_noise_is_log_normal_with_the_papers_moments() -> None:
    u_B = (torch.arange(20000) + 0.5) / 20000
    log_sigma_B = SCHEDULES["edm_train"].sample(u_B) / -2
    assert log_sigma_B.mean() == pytest.approx(-1.2, abs=1e-3)
    assert log_sigma_B.std() == pytest.approx(1.2, abs=2e-3)


def test_stable_diffusion_meets_its_knots() -> None:
    var_N = scaled_linear_variances([0.00085, 0.012], 1000, torch.device("cpu"))
    knots = torch.tensor([0, 1, 500, 999, 1000])
    assert var_N.shape == (1001,)
    torch.testing.assert_close(SCHEDULES["stable_diffusion"](knots / 1000).sigmoid(), var_N[knots], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(COSINE, discrete_steps=1), "discrete_steps=1 must be greater than"),
        (lambda: EDMSampleSchedule(sigma_range=[0.0, 80.0], p=7.0), r"sigma_range\[0\]=0.0 must be greater"),
        (lambda: replace(SCHEDULES["edm_train"], std=0.0), "std=0.0 must be greater"),
    ],
)
def test_values_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
