from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diffusers import DDPMScheduler

from cascade_train.diffusion.distance import MAE, MSE, Distance, Huber, SmoothL1
from cascade_train.diffusion.objective import Objective
from cascade_train.errors import ConfigError

ERRORS = torch.linspace(-3, 3, 32).reshape(2, 1, 4, 4)
LEVELS = torch.tensor([-2.0, 4.0])


def by_hand(name: str, error: float, delta: float) -> float:
    """The loss of one number as sd-scripts writes it (library/train_util.py, conditional_loss)."""
    root = (error**2 + delta**2) ** 0.5
    return {"huber": 2 * delta * (root - delta), "smooth_l1": 2 * (root - delta)}[name]


@pytest.mark.parametrize(("name", "kind"), [("huber", Huber), ("smooth_l1", SmoothL1)])
@pytest.mark.parametrize("schedule", ["constant", "snr"])
def test_a_distance_is_that_of_sd_scripts(name: str, kind: type[SmoothL1], schedule: str) -> None:
    alphas = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012).alphas_cumprod.double()
    kept = alphas[[100, 900]]
    sigma = ((1 - kept) / kept) ** 0.5  # get_huber_threshold_if_needed there
    deltas = [0.3, 0.3] if schedule == "constant" else ((1 - 0.3) / (1 + sigma) ** 2 + 0.3).tolist()
    found = kind(delta=0.3, schedule=schedule)(ERRORS, (kept / (1 - kept)).log().float())  # type: ignore[arg-type]
    wanted = [
        [by_hand(name, error, d) for error in each.flatten().tolist()] for each, d in zip(ERRORS, deltas, strict=True)
    ]
    torch.testing.assert_close(found.flatten(1), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("distance", [Huber(delta=0.1, schedule="snr"), SmoothL1(delta=0.1, schedule="snr"), MAE()])
def test_the_weighted_loss_is_of_the_distance_and_the_unweighted_one_of_squares(
    distance: Distance, build: Callable[..., Objective], latents: tuple[torch.Tensor, ...]
) -> None:
    plain, ours = build("gdf"), build("gdf")
    diffused = plain.diffuse(*latents)
    pred = diffused.target + torch.randn_like(diffused.target)
    mask = torch.zeros_like(pred[:, :1])
    mask[..., 0] = 1.0
    for given in (None, mask):
        ours.distance = MSE()
        assert ours.loss(pred, diffused, given)[0].equal(plain.loss(pred, diffused, given)[0])
        ours.distance = distance
        loss_B, raw_B = ours.loss(pred, diffused, given)
        assert raw_B.equal(plain.loss(pred, diffused, given)[1])
        elements = distance(pred - diffused.target, diffused.logsnr_B)
        kept = elements if given is None else elements[..., 0]
        torch.testing.assert_close(loss_B, kept.flatten(1).mean(1) * diffused.loss_weight_B)


def test_large_errors_pull_no_harder_than_near_ones() -> None:
    error = torch.tensor([[[[0.001, 10.0]]]], requires_grad=True)
    Huber(delta=0.1, schedule="constant")(error, torch.zeros(1)).sum().backward()
    assert error.grad is not None
    near, far = error.grad.flatten().tolist()
    assert near == pytest.approx(2 * 0.001, rel=1e-3)  # as of the squared error
    assert far == pytest.approx(2 * 0.1, rel=1e-3)
    assert MAE()(ERRORS, LEVELS).equal(ERRORS.abs())


def test_a_delta_that_is_no_distance_and_an_unknown_schedule_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"delta=0\.0 must lie in"):
        Huber(delta=0.0, schedule="snr")
    with pytest.raises(ConfigError, match="schedule=exponential is unknown; choose one of constant, snr"):
        SmoothL1(delta=0.1, schedule="exponential")  # type: ignore[arg-type]
