"""Stable Diffusion's objectives are those of diffusers' schedulers and training scripts, whose formulas stand here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from diffusers.training_utils import compute_snr
from torch import Tensor

from cascade_train.diffusion.noise_condition import DDPMTimestepCondition
from cascade_train.diffusion.objective import Objective
from cascade_train.diffusion.sampler import ImageNoise, sample
from cascade_train.diffusion.scaling import EDMScaling, VPScaling
from cascade_train.diffusion.schedule import DDPMSchedule
from cascade_train.diffusion.target import EDMTarget
from cascade_train.errors import ConfigError

Build = Callable[..., Objective]
LATENTS = torch.randn(2, 1000, 2, 2, 3, generator=torch.Generator().manual_seed(0))
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000}
ALL_STEPS = (torch.arange(1000) + 0.5) / 1000
"""Uniform numbers that hit every timestep once, the last one first."""


def schedule(**changes: Any) -> DDPMSchedule:
    return DDPMSchedule(**{"beta_schedule": "scaled_linear", **BETAS, **changes})


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_noised_latents_velocities_and_timesteps_are_the_schedulers(kind: str, zero_snr: bool, build: Build) -> None:
    options = {**BETAS, "beta_schedule": kind, "rescale_betas_zero_snr": zero_snr}
    theirs, ours = DDPMScheduler(**options), build("ddpm_v", schedule=options)
    x0, noise = LATENTS
    diffused = ours.diffuse(x0, noise, ALL_STEPS)
    steps = torch.arange(999, -1, -1)
    assert torch.equal(diffused.timestep_ratio_B, steps.float())
    rounding = {"atol": 1e-5 if kind == "squaredcos_cap_v2" else 2e-6, "rtol": 1e-6}  # its first steps: b^2 = 1 - a^2
    torch.testing.assert_close(diffused.noised, theirs.add_noise(x0, noise, steps), **rounding)
    torch.testing.assert_close(diffused.target, theirs.get_velocity(x0, noise, steps), **rounding)


def test_between_timesteps_the_condition_is_linear_and_outside_it_stops() -> None:
    condition = DDPMTimestepCondition(schedule=schedule())
    knots = schedule().knots(torch.device("cpu"))
    middle = condition((knots[:-1] + knots[1:]) / 2)
    torch.testing.assert_close(middle, torch.arange(999) + 0.5, atol=1e-2, rtol=0)
    assert condition(torch.tensor([99.0, -99.0])).tolist() == [0.0, 999.0]


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_loss_with_min_snr_and_offset_noise_is_the_training_scripts(prediction: str, build: Build) -> None:
    """diffusers, examples/text_to_image/train_text_to_image.py: --snr_gamma 5 --noise_offset 0.1."""
    x0, noise = LATENTS
    offset, pred = torch.randn(1000, 2, 1, 1), torch.randn_like(x0)
    theirs, steps = DDPMScheduler(beta_schedule="scaled_linear", **BETAS), torch.arange(999, -1, -1)
    noise_with_offset = noise + 0.1 * offset
    is_v = prediction == "v_prediction"
    target = theirs.get_velocity(x0, noise_with_offset, steps) if is_v else noise_with_offset
    snr = compute_snr(theirs, steps)
    weights = torch.stack([snr, 5.0 * torch.ones_like(steps)], dim=1).min(dim=1)[0] / (snr + 1 if is_v else snr)
    expected = (pred - target).square().mean(dim=(1, 2, 3)) * weights

    by_target = {"loss_weight": {"target": "v"}, "target": {"_target_": "cascade_train.diffusion.target.VTarget"}}
    ours = build("ddpm_min_snr", offset_noise=0.1, **by_target if is_v else {})
    loss_B, _ = ours.loss(pred, ours.diffuse(x0, noise, ALL_STEPS, offset))
    torch.testing.assert_close(loss_B, expected, atol=1e-6, rtol=2e-5)


def test_a_perturbed_input_is_the_training_scripts_and_keeps_its_target(build: Build) -> None:
    """diffusers, train_text_to_image.py: new_noise = noise + input_perturbation * randn; the target is the noise."""
    (x0, noise), further = LATENTS, torch.randn_like(LATENTS[0])
    theirs = DDPMScheduler(beta_schedule="scaled_linear", **BETAS)
    diffused = build("ddpm", input_perturbation=0.1).diffuse(x0, noise, ALL_STEPS, None, further)
    expected = theirs.add_noise(x0, noise + 0.1 * further, torch.arange(999, -1, -1))
    torch.testing.assert_close(diffused.noised, expected, atol=2e-6, rtol=1e-6)
    assert torch.equal(diffused.target, noise)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize(("sampler", "eta"), [("ddim", 0.0), ("ddpm", 1.0)])
def test_samples_are_those_of_diffusers_scheduler_at_equal_noise(
    prediction: str, sampler: str, eta: float, build: Build
) -> None:
    theirs = DDIMScheduler(
        beta_schedule="scaled_linear",
        timestep_spacing="trailing",
        clip_sample=False,
        prediction_type=prediction,
        **BETAS,
    )
    theirs.set_timesteps(20)
    objective = build("ddpm_v" if prediction == "v_prediction" else "ddpm")

    def network(noised: Tensor, timestep: Tensor) -> Tensor:
        return torch.tanh(noised.roll(1, -1)) + timestep.view(-1, 1, 1, 1) / 1000

    def draws() -> ImageNoise:
        generators = [torch.Generator().manual_seed(5 + i) for i in range(2)]
        return ImageNoise(generators=generators, shape=(2, 3, 4), device=torch.device("cpu"))

    noise = draws()
    x = noise()
    for step in theirs.timesteps:
        fresh = noise()
        pred = network(x, step.float().expand(2))
        x = theirs.step(pred, int(step), x, eta=eta, variance_noise=fresh if eta else None)[0]
    found = sample(lambda x, t: (network(x, t), None), objective=objective, noise=draws(), steps=20, sampler=sampler)
    torch.testing.assert_close(found, x, atol=1e-4, rtol=1e-4)


def test_a_terminal_timestep_of_noise_alone_is_sampled_from_by_velocity(build: Build) -> None:
    options = {**BETAS, "beta_schedule": "scaled_linear", "rescale_betas_zero_snr": True}
    objective = build("ddpm_v", schedule=options)
    assert objective.scaling(objective.schedule(torch.ones(1)))[0] < 1e-12
    with pytest.raises(ConfigError, match="where the latents are noise alone, predicting it teaches nothing"):
        build("ddpm", schedule=options)


def test_edm_preconditioning_is_its_papers_table(build: Build) -> None:
    """Karras et al. 2022, table 1: D(x) = c_skip x + c_out F(c_in x; c_noise), weight lambda on the loss of D."""
    data = 0.5
    u_B = torch.linspace(0.01, 0.99, 1000)
    x0, noise = data * LATENTS[0], LATENTS[1]
    objective, pred = build("edm_sdxl"), torch.randn_like(x0)
    diffused = objective.diffuse(x0, noise, u_B)
    sigma = (diffused.logsnr_B / -2).exp()[:, None, None, None]
    noisy, root = x0 + sigma * noise, (sigma**2 + data**2).sqrt()
    denoised = data**2 / root**2 * noisy + sigma * data / root * pred
    expected = (((denoised - x0) ** 2) * (root / (sigma * data)) ** 2).mean(dim=(1, 2, 3))
    torch.testing.assert_close(diffused.noised, noisy / root, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(diffused.timestep_ratio_B, sigma.log().flatten() / 4, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(objective.loss(pred, diffused)[0], expected, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(objective.x0(pred, diffused.noised, diffused.logsnr_B), denoised, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        objective.predicted_noise(diffused.target, diffused.noised, diffused.logsnr_B), noise, atol=2e-2, rtol=1e-2
    )


def test_edm_scaling_of_unit_data_keeps_the_variance() -> None:
    levels = torch.linspace(-9, 9, 19)
    torch.testing.assert_close(EDMScaling(sigma_data=1.0)(levels), VPScaling()(levels))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedule(beta_schedule="cosine"), "beta_schedule=cosine is unknown"),
        (lambda: schedule(beta_start=0.02), r"\[beta_start, beta_end\]=\[0.02, 0.012\] must be two numbers"),
        (lambda: schedule(beta_start=0.0), "beta_start=0.0 must be greater"),
        (lambda: EDMScaling(sigma_data=0.0), "sigma_data=0.0 must be greater"),
        (lambda: EDMTarget(sigma_data=-1.0), "sigma_data=-1.0 must be greater"),
    ],
)
def test_values_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_min_snr_is_written_for_what_the_network_predicts(build: Build) -> None:
    with pytest.raises(
        ConfigError, match=r"loss_weight\.target=v: .* EpsilonTarget, .* set loss_weight\.target=epsilon"
    ):
        build("ddpm_min_snr", loss_weight={"target": "v"})
