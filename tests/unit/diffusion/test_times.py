from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling

from cascade_train.diffusion.objective import Objective
from cascade_train.diffusion.times import BetaTimes, LogitNormalTimes, ModeTimes, Times, _beta_table
from cascade_train.diffusion.timestep_bias import TimestepBias
from cascade_train.errors import ConfigError

U = (torch.arange(4096) + 0.5) / 4096
ALL: list[Times] = [
    LogitNormalTimes(mean=0.5, std=1.3), LogitNormalTimes(mean=-3.0, std=0.2),
    ModeTimes(scale=1.29), ModeTimes(scale=-1.0), ModeTimes(scale=2 / (math.pi - 2)),
    BetaTimes(alpha=2.0, beta=5.0), BetaTimes(alpha=1.0, beta=1.0), BetaTimes(alpha=60.0, beta=1.0),
]  # fmt: skip


def times_of_diffusers(monkeypatch: pytest.MonkeyPatch, scheme: str, **options: float) -> torch.Tensor:
    """Return the times of diffusers' function for the uniform numbers U, counted as its scripts count timesteps."""
    normal = torch.special.ndtri(U)
    monkeypatch.setattr(torch, "rand", lambda **_: U)
    monkeypatch.setattr(torch, "normal", lambda mean, std, **_: mean + std * normal)
    given = {"logit_mean": 0.0, "logit_std": 1.0, "mode_scale": 1.29, **options}
    found = compute_density_for_timestep_sampling(weighting_scheme=scheme, batch_size=len(U), **given)
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=2**20)
    return scheduler.timesteps[(found * 2**20).long().clamp(max=2**20 - 1)] / 2**20


def test_logit_normal_times_are_those_of_diffusers_with_the_mean_counted_from_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = times_of_diffusers(monkeypatch, "logit_normal", logit_mean=-0.7, logit_std=1.2)
    ours = 1 - LogitNormalTimes(mean=0.7, std=1.2)(U)
    torch.testing.assert_close(ours.sort().values, theirs.sort().values, atol=3e-6, rtol=0)
    assert ours.median().item() == pytest.approx(1 / (1 + math.exp(-0.7)), abs=1e-3)


@pytest.mark.parametrize("scale", [1.29, -0.8, 0.0])
def test_times_of_a_mode_are_those_of_diffusers(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    theirs = times_of_diffusers(monkeypatch, "mode", mode_scale=scale)
    ours = 1 - ModeTimes(scale=scale)(U)
    torch.testing.assert_close(ours.sort().values, theirs.sort().values, atol=3e-6, rtol=0)


@pytest.mark.parametrize(("alpha", "beta"), [(2, 5), (1, 3), (7, 1), (60, 40)])
def test_times_of_a_beta_distribution_are_its_quantiles(alpha: int, beta: int) -> None:
    """Of whole numbers its distribution function is a sum of binomial probabilities."""
    t = (1 - BetaTimes(alpha=alpha, beta=beta)(U)).double()
    tosses = alpha + beta - 1
    share = sum(float(math.comb(tosses, n)) * t**n * (1 - t) ** (tosses - n) for n in range(alpha, tosses + 1))
    torch.testing.assert_close(share, 1 - U.double(), atol=2e-5, rtol=0)


def test_a_beta_distribution_of_fractions_has_its_quantiles() -> None:
    t = 1 - BetaTimes(alpha=2.5, beta=1.0)(U)
    torch.testing.assert_close(t**2.5, 1 - U, atol=2e-5, rtol=0)


def test_the_table_of_a_beta_distribution_is_summed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's sum is refused where a run is deterministic."""
    devices, of_torch = [], torch.cumulative_trapezoid
    monkeypatch.setattr(torch, "cumulative_trapezoid", lambda y: devices.append(y.device.type) or of_torch(y))
    table = _beta_table.__wrapped__(2.0, 5.0, torch.device("meta"))
    assert devices == ["cpu"]
    assert [each.device.type for each in table] == ["meta", "meta"]


@pytest.mark.parametrize("times", ALL)
def test_times_stay_inside_and_depend_on_nothing_but_their_own_number(times: Times) -> None:
    ends = times(torch.tensor([0.0, 2**-24, 0.5, 1 - 2**-24]))
    assert bool(((ends >= 0) & (ends < 1)).all())
    mapped = times(U)
    assert bool((mapped.diff() > -1e-6).all())
    assert times(U[7:8]).equal(mapped[7:8])


@pytest.mark.parametrize("times", [BetaTimes(alpha=1.0, beta=1.0), ModeTimes(scale=0.0)])
def test_both_have_uniform_times_among_them(times: Times) -> None:
    torch.testing.assert_close(times(U), U, atol=1e-6, rtol=0)


def test_an_objective_noises_at_the_times_that_are_drawn(
    build: Callable[..., Objective], latents: tuple[torch.Tensor, ...]
) -> None:
    plain = build("gdf")
    times = LogitNormalTimes(mean=1.0, std=0.5)
    x0, noise, u = latents[:3]
    found = replace(plain, times=times).diffuse(x0, noise, u)
    assert found.logsnr_B.equal(plain.diffuse(x0, noise, times(u)).logsnr_B)
    assert not found.logsnr_B.equal(plain.diffuse(x0, noise, u).logsnr_B)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModeTimes(scale=1.8), r"times\.scale=1\.8 must lie in \[-1\.0, 1\.75"),
        (lambda: ModeTimes(scale=-1.1), r"times\.scale=-1\.1 must lie in"),
        (lambda: BetaTimes(alpha=0.5, beta=2.0), r"times\.alpha=0\.5 must lie in \[1\.0, 100\.0\]"),
        (lambda: BetaTimes(alpha=2.0, beta=101.0), r"times\.beta=101\.0 must lie in"),
        (lambda: LogitNormalTimes(mean=0.0, std=0.0), r"times\.std=0\.0 must be greater than 0"),
    ],
)
def test_distributions_that_are_none_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_two_distributions_at_once_are_refused(build: Callable[..., Objective]) -> None:
    times = ModeTimes(scale=1.0)
    with pytest.raises(ConfigError, match="times: LogitNormalSchedule has a distribution of its own"):
        replace(build("flow_matching"), times=times)
    bias = TimestepBias(strategy="later", multiplier=2.0, begin=0.0, end=1.0, portion=0.5)
    with pytest.raises(ConfigError, match=r"timestep_bias\.strategy=later favours some of uniform times"):
        replace(build("gdf"), times=times, timestep_bias=bias)
