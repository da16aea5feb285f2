from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cascade_train.diffusion.objective import Objective, masked_mean
from cascade_train.errors import ConfigError, RunError
from tests.unit.diffusion.conftest import OBJECTIVES, shipped

Latents = tuple[Tensor, Tensor, Tensor]
Build = Callable[..., Objective]


def test_all_shipped_objectives_are_tested() -> None:
    assert tuple(shipped()) == OBJECTIVES


def test_a_perfect_prediction_has_no_loss_and_a_better_one_has_less(objective: Objective, latents: Latents) -> None:
    diffused = objective.diffuse(*latents)
    losses = [objective.loss(diffused.target + error, diffused)[0] for error in (0.0, 0.1, 1.0)]
    assert (losses[0] == 0).all()
    assert (losses[1] < losses[2]).all()
    assert losses[2].isfinite().all()


def test_the_loss_is_the_weighted_mean_square_of_each_sample(objective: Objective, latents: Latents) -> None:
    diffused = objective.diffuse(*latents)
    loss_B, loss_raw_B = objective.loss(diffused.target + 2.0, diffused)
    assert loss_B.shape == loss_raw_B.shape == (32,)
    assert loss_B.dtype == loss_raw_B.dtype == torch.float32
    torch.testing.assert_close(loss_raw_B, torch.full((32,), 4.0))
    torch.testing.assert_close(loss_B, 4.0 * diffused.loss_weight_B)


def test_a_masked_mean_counts_what_the_mask_keeps() -> None:
    value = torch.arange(16.0).reshape(1, 1, 4, 4).repeat(4, 2, 1, 1)
    mask = torch.zeros(4, 1, 4, 4)
    mask[0] = 1.0
    mask[1, 0, 0] = 1.0
    mask[2, 0, :2] = 0.5
    mask[3, 0, 0, 1] = 0.25
    assert masked_mean(value, mask).tolist() == [7.5, 1.5, 3.5, 0.25]
    assert masked_mean(value, 0 * mask).tolist() == [0.0] * 4


def test_noised_latents_are_taken_apart_again(objective: Objective, latents: Latents) -> None:
    x0, noise, _ = latents
    diffused = objective.diffuse_at(x0, noise, torch.linspace(-5, 5, 32))
    again = objective.x0(diffused.target, diffused.noised, diffused.logsnr_B)
    torch.testing.assert_close(again, x0, atol=1e-4, rtol=1e-4)
    again = objective.predicted_noise(diffused.target, diffused.noised, diffused.logsnr_B)
    torch.testing.assert_close(again, noise, atol=1e-4, rtol=1e-4)


def test_everything_is_fp32_and_of_the_documented_shape(objective: Objective, latents: Latents) -> None:
    x0, noise, u_B = latents
    diffused = objective.diffuse(x0.bfloat16(), noise, u_B)
    assert {value.dtype for value in vars(diffused).values()} == {torch.float32}
    assert diffused.noised.shape == diffused.target.shape == diffused.noise.shape == x0.shape
    assert diffused.logsnr_B.shape == diffused.timestep_ratio_B.shape == diffused.loss_weight_B.shape == (32,)
    assert objective.x0(diffused.target.bfloat16(), diffused.noised, diffused.logsnr_B).dtype == torch.float32


def test_only_the_prediction_gets_a_gradient(objective: Objective, latents: Latents) -> None:
    diffused = objective.diffuse(*latents)
    pred = torch.zeros_like(diffused.target, requires_grad=True)
    loss_B, _ = objective.loss(pred, diffused)
    loss_B.sum().backward()
    assert pred.grad is not None
    expected = -2 * diffused.target * diffused.loss_weight_B[:, None, None, None] / pred[0].numel()
    torch.testing.assert_close(pred.grad, expected)


def test_a_sample_does_not_depend_on_the_batch_around_it(objective: Objective, latents: Latents) -> None:
    whole = objective.diffuse(*latents)
    part = objective.diffuse(*(value[7:9] for value in latents))
    for name, value in vars(part).items():
        assert torch.equal(value, getattr(whole, name)[7:9]), name


def test_nothing_waits_for_the_device(objective: Objective, latents: Latents) -> None:
    """On the meta device any read of a value raises, as it would stall a GPU."""
    diffused = objective.diffuse(*(value.to("meta") for value in latents))
    loss_B, loss_raw_B = objective.loss(diffused.noised, diffused)
    objective.after_step(diffused.logsnr_B, loss_raw_B)
    x0 = objective.x0(diffused.noised, diffused.noised, diffused.logsnr_B)
    assert loss_B.is_meta
    assert x0.is_meta


def test_an_objective_built_where_models_are_built_keeps_its_numbers(build: Build, latents: Latents) -> None:
    for name in OBJECTIVES:
        with torch.device("meta"):
            objective = build(name)
        assert objective.diffuse(*latents).logsnr_B.isfinite().all()


def test_offset_noise_moves_whole_channels_and_is_part_of_the_target(build: Build, latents: Latents) -> None:
    x0, noise, u_B = latents
    offset = torch.randn(32, 4, 1, 1, generator=torch.Generator().manual_seed(2))
    plain, moved = build("gdf").diffuse(*latents), build("gdf", offset_noise=0.1).diffuse(x0, noise, u_B, offset)
    torch.testing.assert_close(moved.target - plain.target, (0.1 * offset).expand_as(x0), atol=1e-6, rtol=0)
    assert torch.equal(moved.target, moved.noise)


def test_offset_noise_without_its_normals_is_refused_in_training(build: Build, latents: Latents) -> None:
    objective = build("gdf", offset_noise=0.1)
    with pytest.raises(RunError, match="offset_noise=0.1 needs normals of shape"):
        objective.diffuse(*latents)
    x0, noise, _ = latents
    assert torch.equal(objective.diffuse_at(x0, noise, torch.zeros(32)).noise, noise)


def test_a_shift_trains_at_more_noise(build: Build, latents: Latents) -> None:
    plain, shifted = (build("gdf", shift=shift).diffuse(*latents).logsnr_B for shift in (1.0, 2.0))
    assert (shifted <= plain).all()
    assert shifted.mean() < plain.mean() - 1


def test_larger_latents_train_at_more_noise_by_their_size(build: Build, latents: Latents) -> None:
    x0, noise, u_B = latents
    based = build("gdf", base_latent_size=30**0.5)
    assert torch.equal(based.diffuse(x0, noise, u_B).logsnr_B, build("gdf").diffuse(*latents).logsnr_B)
    wide_x0, wide_noise = x0.repeat(1, 1, 2, 2), noise.repeat(1, 1, 2, 2)
    expected = build("gdf", shift=2.0).diffuse(*latents).logsnr_B
    torch.testing.assert_close(based.diffuse(wide_x0, wide_noise, u_B).logsnr_B, expected)
    assert build("gdf", shift=3.0, base_latent_size=12.0).shift_for(24, 24) == pytest.approx(6.0)


def test_a_favoured_span_of_times_is_trained_more_often(build: Build, latents: Latents) -> None:
    x0, noise, _ = latents
    u_B = torch.linspace(0, 0.999, 32)
    noisy = {"timestep_bias": {"strategy": "later", "multiplier": 4.0, "portion": 0.25}}
    plain, favoured = (build("gdf", **changes).diffuse(x0, noise, u_B).logsnr_B for changes in ({}, noisy))
    bound = build("gdf").schedule(torch.tensor([0.75]))
    assert (plain < bound).float().mean() == pytest.approx(1 / 4, abs=0.05)
    assert (favoured < bound).float().mean() == pytest.approx(4 / 7, abs=0.05)


def test_edm_is_what_its_paper_trains(build: Build, latents: Latents) -> None:
    """Karras et al. 2022, table 1 and eq. 8, with data of unit variance; its target is minus the velocity."""
    x0, noise, u_B = latents
    diffused = build("edm").diffuse(x0, noise, u_B)
    sigma = (diffused.logsnr_B / -2).exp()[:, None, None, None]
    noisy = x0 + sigma * noise
    c_in, c_skip, c_out = 1 / (1 + sigma**2).sqrt(), 1 / (1 + sigma**2), sigma / (1 + sigma**2).sqrt()
    torch.testing.assert_close(diffused.noised, c_in * noisy, atol=1e-4, rtol=1e-4)
    inside = slice(2, None)  # the two ends of the uniform numbers are ill-conditioned in fp32
    torch.testing.assert_close(diffused.target[inside], -((x0 - c_skip * noisy) / c_out)[inside], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(diffused.loss_weight_B, (((1 + sigma**2) / sigma**2) * c_out**2).flatten())
    torch.testing.assert_close(diffused.timestep_ratio_B, sigma.log().flatten() / 4)


def test_only_the_adaptive_objective_has_state(build: Build) -> None:
    assert {name: list(build(name).state_dict()) for name in OBJECTIVES if build(name).state_dict()} == {
        "adaptive": ["loss_weight.bucket_loss"]
    }


def test_an_adaptive_objective_learns_after_the_step_and_is_restored(build: Build, latents: Latents) -> None:
    objective, fresh = build("adaptive"), build("adaptive")
    before = objective.diffuse(*latents)
    objective.after_step(before.logsnr_B, torch.full((32,), 3.0, requires_grad=True))
    after = objective.diffuse(*latents)
    assert (before.loss_weight_B == 1).all()
    assert (after.loss_weight_B < 1).all()
    fresh.load_state_dict(objective.state_dict())
    assert torch.equal(fresh.diffuse(*latents).loss_weight_B, after.loss_weight_B)


def test_the_state_of_another_objective_is_refused(build: Build) -> None:
    with pytest.raises(RunError, match="resume with the objective that the run was started with"):
        build("adaptive").load_state_dict({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset_noise": -0.1}, "offset_noise=-0.1 must lie in"),
        ({"shift": 0.0}, "shift=0.0 must be greater"),
        ({"base_latent_size": 0.0}, "base_latent_size=0.0 must be greater"),
    ],
)
def test_values_out_of_range_are_refused(build: Build, changes: dict[str, float], message: str) -> None:
    parts = vars(build("gdf"))
    with pytest.raises(ConfigError, match=message):
        Objective(**parts | changes)
