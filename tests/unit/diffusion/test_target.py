from __future__ import annotations

import pytest
import torch

from cascade_train.diffusion.scaling import LerpScaling, Scaling, VPScaling, per_sample
from cascade_train.diffusion.target import EpsilonTarget, RectifiedFlowTarget, Target, VTarget, X0Target

TARGETS = (EpsilonTarget(), X0Target(), VTarget(), RectifiedFlowTarget())
LOGSNR = torch.linspace(-6, 6, 13)


@pytest.mark.parametrize("scaling", [VPScaling(), LerpScaling()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: type(t).__name__)
def test_the_inverses_give_back_x0_and_noise_for_every_scaling(target: Target, scaling: Scaling) -> None:
    x0, noise = torch.randn(2, 13, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    a, b = (per_sample(scale_B) for scale_B in scaling(LOGSNR))
    noised = a * x0 + b * noise
    pred = target(x0, noise, a, b)
    assert pred.shape == x0.shape
    torch.testing.assert_close(target.x0(pred, noised, a, b), x0, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(target.noise(pred, noised, a, b), noise, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: type(t).__name__)
def test_what_a_prediction_implies_adds_up_to_the_noised_latents(target: Target) -> None:
    pred, noised = torch.randn(2, 13, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    a, b = (per_sample(scale_B) for scale_B in VPScaling()(LOGSNR))
    again = a * target.x0(pred, noised, a, b) + b * target.noise(pred, noised, a, b)
    if isinstance(target, VTarget | RectifiedFlowTarget):
        torch.testing.assert_close(again, noised, atol=1e-4, rtol=1e-4)
    else:
        torch.testing.assert_close(again, noised, atol=1e-3, rtol=1e-3)


def test_velocity_is_the_derivative_along_the_circle() -> None:
    x0, noise = torch.tensor([[[[2.0]]]]), torch.tensor([[[[3.0]]]])
    a, b = torch.tensor([[[[0.6]]]]), torch.tensor([[[[0.8]]]])
    torch.testing.assert_close(VTarget()(x0, noise, a, b), torch.tensor([[[[0.6 * 3 - 0.8 * 2]]]]))
