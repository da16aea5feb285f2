from __future__ import annotations

import pytest
import torch

from cascade_train.diffusion.scaling import LerpScaling, Scaling, VPScaling, per_sample
from cascade_train.diffusion.target import EpsilonTarget, RectifiedFlowTarget, Target, VTarget, X0Target

LOGSNR = torch.linspace(-6, 6, 13)


@pytest.mark.parametrize("scaling", [VPScaling(), LerpScaling()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    "target", [EpsilonTarget(), X0Target(), VTarget(), RectifiedFlowTarget()], ids=lambda t: type(t).__name__
)
def test_the_inverses_give_back_x0_and_noise_for_every_scaling(target: Target, scaling: Scaling) -> None:
    x0, noise = torch.randn(2, 13, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    a, b = (per_sample(scale_B) for scale_B in scaling(LOGSNR))
    pred, noised = target(x0, noise, a, b), a * x0 + b * noise
    torch.testing.assert_close(target.x0(pred, noised, a, b), x0, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(target.noise(pred, noised, a, b), noise, atol=2e-4, rtol=1e-4)
