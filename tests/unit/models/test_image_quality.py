"""How near a reconstruction comes, and what a stage has to beat."""

from __future__ import annotations

import pytest
import torch

from cascade_train.models.image_quality import image_quality, psnr, reconstruction_quality


def test_psnr_is_that_of_a_known_error() -> None:
    original = torch.full((2, 3, 16, 16), 0.5)
    image = original + torch.tensor([0.1, 0.01]).view(2, 1, 1, 1)
    assert psnr(image, original).tolist() == pytest.approx([20.0, 40.0], abs=1e-3)
    same = image_quality(original, original)
    assert (same["psnr"].tolist(), same["ssim"].tolist()) == ([100.0, 100.0], [1.0, 1.0])


def test_means_of_squares_brought_back_are_what_is_to_be_beaten() -> None:
    plain = torch.rand(1, 3, 1, 1, generator=torch.Generator().manual_seed(0)).expand(1, 3, 32, 32)
    fine = torch.zeros(1, 3, 32, 32)
    fine[..., ::2] = 1.0
    ramp = torch.linspace(0, 1, 32).expand(1, 3, 32, 32)
    original = torch.cat([plain, fine, ramp])
    found = reconstruction_quality(original, original, multiple=8)
    assert found["psnr"].tolist() == [100.0] * 3
    assert found["psnr_bilinear"].shape == (3,)
    assert found["psnr_bilinear"][0] > 90, "a plain picture is all in its means"
    assert found["psnr_bilinear"][1].item() == pytest.approx(10 * torch.tensor(4.0).log10().item(), abs=1e-3)
    assert 20 < found["psnr_bilinear"][2] < 60, "a ramp comes back but for its ends"
