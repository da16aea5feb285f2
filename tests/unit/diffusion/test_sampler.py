from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cascade_train.diffusion.objective import Objective
from cascade_train.diffusion.sampler import (
    ImageNoise,
    SampleStep,
    Scales,
    apply_guidance,
    ddim_step,
    ddpm_step,
    lcm_step,
    sample,
)
from cascade_train.diffusion.scaling import LerpScaling, VPScaling
from cascade_train.errors import ConfigError
from tests.unit.diffusion.conftest import OBJECTIVES

Build = Callable[..., Objective]
MEAN, SPREAD = 1.5, 0.6
"""The Gaussian that an ideal network was trained on, the same for every number of a latent."""
CPU = torch.device("cpu")


def noise(count: int, shape: tuple[int, int, int] = (2, 8, 8), seed: int = 0) -> ImageNoise:
    generators = [torch.Generator().manual_seed(seed + i) for i in range(count)]
    return ImageNoise(generators=generators, shape=shape, device=CPU)


def echo(noised: Tensor, _: Tensor) -> tuple[Tensor, None]:
    return noised, None


class IdealNetwork:
    """Predicts what the best network would for Gaussian data, at the noise level of each call."""

    def __init__(self, objective: Objective, steps: int, schedule: Any = None) -> None:
        self.objective = objective
        t = torch.linspace(1, 0, steps + 1)
        self.levels = iter((objective.schedule if schedule is None else schedule)(t))

    def __call__(self, noised: Tensor, ratio_B: Tensor) -> tuple[Tensor, None]:
        logsnr = next(self.levels)
        assert torch.equal(ratio_B, self.objective.noise_condition(logsnr.expand(len(noised))))
        a, b = (scale[:, None, None, None] for scale in self.objective.scaling(logsnr[None]))
        x0 = MEAN + a * SPREAD**2 * (noised - a * MEAN) / (a**2 * SPREAD**2 + b**2)
        return self.objective.target(x0, (noised - a * x0) / b, a, b), None


@pytest.mark.parametrize("name", OBJECTIVES)
def test_ddim_follows_the_exact_flow_of_a_gaussian(name: str, build: Build) -> None:
    objective = build(name)
    result = sample(IdealNetwork(objective, 400), objective=objective, noise=noise(2), steps=400, sampler="ddim")
    start = noise(2)()
    a, b = (float(scale) for scale in objective.scaling(objective.schedule(torch.ones(1))))
    exact = MEAN + SPREAD * (start - a * MEAN) / (a**2 * SPREAD**2 + b**2) ** 0.5
    torch.testing.assert_close(result, exact, atol=0.02, rtol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_samples_of_a_gaussian_have_its_mean_and_spread(name: str, sampler: str, build: Build) -> None:
    objective = build(name)
    result = sample(
        IdealNetwork(objective, 200), objective=objective, noise=noise(1, (2, 64, 64)), steps=200, sampler=sampler
    )
    a, b = (float(scale) for scale in objective.scaling(objective.schedule(torch.ones(1))))
    missing = a * MEAN * SPREAD / (a**2 * SPREAD**2 + b**2) ** 0.5 if sampler == "ddim" else 0.0
    assert result.mean() == pytest.approx(MEAN - missing, abs=0.04), "the start is noise alone, also where a is not 0"
    assert result.std() == pytest.approx(SPREAD, rel=0.05)


def test_consistency_sampling_ends_at_the_networks_x0(build: Build) -> None:
    objective, x0 = build("gdf"), torch.full((2, 2, 8, 8), 0.3)
    levels = iter(objective.schedule(torch.linspace(1, 0, 5)))

    def consistent(noised: Tensor, _: Tensor) -> tuple[Tensor, None]:
        a, b = objective.scaling(next(levels))
        return (noised - a * x0) / b, None

    steps: list[SampleStep] = []
    result = sample(consistent, objective=objective, noise=noise(2), steps=4, sampler="lcm", on_step=steps.append)
    torch.testing.assert_close(result, x0, atol=1e-3, rtol=0)
    assert len(steps) == 4
    assert torch.equal(steps[-1].x0, result)


@pytest.mark.parametrize("scaling", [VPScaling(), LerpScaling()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("step", [ddim_step, functools.partial(ddim_step, eta=0.5), ddpm_step, lcm_step])
def test_a_step_keeps_the_noise_level_it_goes_to(step: Any, scaling: Any) -> None:
    """With true x0 and noise, the step's result is a_next x0 plus noise of variance b_next^2."""
    a_2, b_2 = scaling(torch.tensor([-1.0, 3.0]))
    scales = Scales(a=a_2[0], b=b_2[0], a_next=a_2[1], b_next=b_2[1])
    zero, one = torch.zeros(()), torch.ones(())
    assert step(one, zero, zero, scales) == pytest.approx(float(a_2[1]))
    from_eps, from_fresh = step(zero, one, zero, scales), step(zero, zero, one, scales)
    assert from_eps**2 + from_fresh**2 == pytest.approx(float(b_2[1]) ** 2, rel=1e-5)


def test_ddpm_draws_the_posterior_of_its_paper() -> None:
    """Ho et al. 2020, eq. 7: variance of x_{t-1} given x_t and x0."""
    a_2, b_2 = VPScaling()(torch.tensor([-1.0, 3.0], dtype=torch.float64))
    scales = Scales(a=a_2[0], b=b_2[0], a_next=a_2[1], b_next=b_2[1])
    drawn = ddpm_step(torch.zeros(()), torch.zeros(()), torch.ones(()), scales)
    beta = 1 - (a_2[0] / a_2[1]) ** 2
    assert drawn**2 == pytest.approx(float(beta * b_2[1] ** 2 / b_2[0] ** 2), rel=1e-4)


def test_an_image_does_not_depend_on_the_images_around_it(build: Build) -> None:
    objective = build("gdf")

    def network(noised: Tensor, ratio_B: Tensor) -> tuple[Tensor, Tensor]:
        return noised * ratio_B[:, None, None, None], noised * 0.3

    def run(generators: list[torch.Generator]) -> Tensor:
        source = ImageNoise(generators=generators, shape=(2, 8, 8), device=CPU)
        return sample(network, objective=objective, noise=source, steps=5, guidance_scale=4.0)

    together = run([torch.Generator().manual_seed(seed) for seed in (5, 6, 7)])
    alone = run([torch.Generator().manual_seed(6)])
    assert torch.equal(together[1:2], alone)


def test_noise_of_an_image_is_drawn_once_at_the_start_and_once_per_step(build: Build) -> None:
    objective, calls = build("gdf"), []

    def counted() -> Tensor:
        calls.append(len(calls))
        return torch.zeros(1, 2, 8, 8)

    sample(echo, objective=objective, noise=counted, steps=3)
    assert len(calls) == 4
    sample(echo, objective=objective, noise=counted, steps=3, x_init=torch.ones(1, 2, 8, 8), t_start=0.6)
    assert len(calls) == 7


def test_starting_latents_start_at_their_own_time(build: Build) -> None:
    objective, seen = build("gdf"), []

    def network(noised: Tensor, ratio_B: Tensor) -> tuple[Tensor, None]:
        seen.append((noised.clone(), ratio_B))
        return torch.zeros_like(noised), None

    start = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(3))
    sample(network, objective=objective, noise=noise(1), steps=2, x_init=start, t_start=0.6, t_end=0.2)
    assert torch.equal(seen[0][0], start)
    torch.testing.assert_close(torch.cat([ratio_B for _, ratio_B in seen]), torch.tensor([0.6, 0.4]), atol=1e-4, rtol=0)


def test_another_schedule_may_set_the_levels(build: Build) -> None:
    objective, other = build("gdf"), build("rectified_flow").schedule
    network = IdealNetwork(objective, 50, other)
    assert sample(network, objective=objective, noise=noise(1), steps=50, schedule=other).isfinite().all()


def test_a_shift_spends_the_steps_at_more_noise(build: Build) -> None:
    def ratios(shift: float) -> Tensor:
        seen: list[Tensor] = []

        def network(noised: Tensor, ratio_B: Tensor) -> tuple[Tensor, None]:
            seen.append(ratio_B)
            return noised, None

        sample(network, objective=build("gdf"), noise=noise(1), steps=10, shift=shift)
        return torch.cat(seen)[1:]

    expected = torch.tensor([0.9497, 0.8975, 0.8413, 0.7785, 0.7056, 0.6179, 0.5089, 0.3715, 0.2018])
    torch.testing.assert_close(ratios(2.0), expected, atol=1e-4, rtol=0)
    assert (ratios(2.0) > ratios(1.0)).all()


def test_a_network_in_bf16_is_sampled_in_fp32(build: Build) -> None:
    def network(noised: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return noised.bfloat16(), noised.bfloat16() * 0.5

    steps: list[SampleStep] = []
    sample(network, objective=build("gdf"), noise=noise(1), steps=2, guidance_scale=2.0, on_step=steps.append)
    assert {value.dtype for step in steps for value in vars(step).values()} == {torch.float32}


@pytest.mark.parametrize(("over", "axes"), [("sample", (1, 2, 3)), ("batch", (0, 1, 2, 3))])
def test_guidance_is_linear_and_a_full_rescale_gives_the_conditional_contrast(over: Any, axes: tuple[int, ...]) -> None:
    cond, uncond = torch.randn(2, 3, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(apply_guidance(cond, uncond, scale=1.0, rescale=0.7, rescale_over=over), cond)
    plain = apply_guidance(cond, uncond, scale=3.0, rescale=0.0, rescale_over=over)
    torch.testing.assert_close(plain, 3 * cond - 2 * uncond)
    mixed = apply_guidance(cond, uncond, scale=6.0, rescale=1.0, rescale_over=over)
    torch.testing.assert_close(mixed.std(axes), cond.std(axes))


def test_a_pair_of_scales_goes_from_noise_to_data(build: Build) -> None:
    def network(noised: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(noised), torch.zeros_like(noised)

    steps: list[SampleStep] = []
    options = {"guidance_scale": (6.0, 2.0), "guidance_rescale": 0.0, "on_step": steps.append}
    sample(network, objective=build("gdf"), noise=noise(1), steps=4, **options)
    assert [float(step.pred.mean()) for step in steps] == pytest.approx([6.0, 5.0, 4.0, 3.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0 must be greater"),
        ({"shift": 0.0}, "shift=0.0 must be greater"),
        ({"guidance_rescale": 1.5}, "guidance_rescale=1.5 must lie in"),
        ({"rescale_over": "image"}, "rescale_over=image is unknown; choose one of sample, batch"),
        ({"t_start": 0.2, "t_end": 0.4}, "t_start=0.2 must be greater than 0.4"),
        ({"t_start": 1.2}, "t_start=1.2 must lie in"),
        ({"sampler": "euler"}, "sampler=euler is unknown; choose one of ddpm, ddim, lcm"),
    ],
)
def test_options_out_of_range_are_refused(build: Build, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample(echo, objective=build("gdf"), noise=noise(1), **{"steps": 2} | options)
