from __future__ import annotations

import pytest
import torch

from cascade_train.diffusion.scaling import LerpScaling, Scaling, StretchedScaling, VPScaling, per_sample
from cascade_train.diffusion.schedule import CosineSchedule
from cascade_train.errors import ConfigError

LOGSNR = torch.linspace(-9, 9, 37)
COSINE = CosineSchedule(s=0.008, clamp_range=[1e-4, 0.9999])


@pytest.mark.parametrize("scaling", [VPScaling(), LerpScaling()], ids=lambda s: type(s).__name__)
def test_the_ratio_of_the_scales_is_the_snr(scaling: Scaling) -> None:
    a_B, b_B = scaling(LOGSNR)
    torch.testing.assert_close((a_B / b_B).square(), LOGSNR.exp(), rtol=2e-3, atol=0)


def test_vp_keeps_the_variance() -> None:
    a_B, b_B = VPScaling()(LOGSNR)
    torch.testing.assert_close(a_B**2 + b_B**2, torch.ones_like(LOGSNR))


def test_lerp_is_a_straight_line() -> None:
    a_B, b_B = LerpScaling()(LOGSNR)
    torch.testing.assert_close(a_B + b_B, torch.ones_like(LOGSNR))


@pytest.mark.parametrize("scaling", [VPScaling(), LerpScaling()], ids=lambda s: type(s).__name__)
def test_a_stretch_reaches_pure_noise_and_pure_data(scaling: Scaling) -> None:
    a_B, b_B = StretchedScaling(scaling=scaling, schedule=COSINE)(COSINE(torch.tensor([1.0, 0.0])))
    torch.testing.assert_close(a_B, torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(b_B, torch.tensor([1.0, 0.0]))


def test_a_stretch_of_one_end_leaves_the_other_inside() -> None:
    ends = COSINE(torch.tensor([1.0, 0.0]))
    a_B, b_B = StretchedScaling(scaling=VPScaling(), schedule=COSINE, stretch_min=False)(ends)
    assert (a_B[0], b_B[0]) == (0.0, 1.0)
    assert a_B[1] < 1
    assert b_B[1] > 0


def test_a_stretch_of_neither_end_changes_nothing() -> None:
    same = StretchedScaling(scaling=VPScaling(), schedule=COSINE, stretch_max=False, stretch_min=False)
    assert torch.equal(torch.stack(same(LOGSNR)), torch.stack(VPScaling()(LOGSNR)))


def test_a_stretch_with_a_shift_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ConfigError, match="shift=-1.0 must be greater than"):
        StretchedScaling(scaling=VPScaling(), schedule=COSINE, shift=-1.0)


def test_per_sample_broadcasts_over_channels_and_space() -> None:
    assert (per_sample(torch.tensor([1.0, 2.0])) * torch.ones(2, 3, 4, 5)).sum(dim=(1, 2, 3)).tolist() == [60.0, 120.0]
