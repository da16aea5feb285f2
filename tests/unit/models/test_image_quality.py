"""How near a reconstruction comes, and what a stage has to beat."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cascade_train.errors import ConfigError
from cascade_train.models.image_quality import ReconstructionQuality, image_quality, psnr
from cascade_train.models.perceptual import load_lpips


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
    found = ReconstructionQuality(multiple=8, lpips=None)(original, original)
    assert found["psnr"].tolist() == [100.0] * 3
    assert found["psnr_bilinear"].shape == (3,)
    assert found["psnr_bilinear"][0] > 90, "a plain picture is all in its means"
    assert found["psnr_bilinear"][1].item() == pytest.approx(10 * torch.tensor(4.0).log10().item(), abs=1e-3)
    assert 20 < found["psnr_bilinear"][2] < 60, "a ramp comes back but for its ends"


def test_lpips_is_that_of_torchmetrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchmetrics.functional.image import lpips
    from torchvision.models.vgg import cfgs, make_layers

    torch.manual_seed(0)
    features = make_layers(cfgs["D"])
    save_file(
        {f"features.{name}": value for name, value in features.state_dict().items()}, tmp_path / "vgg.safetensors"
    )
    monkeypatch.setattr(lpips, "_get_tv_model_features", lambda net, pretrained: features)
    theirs = lpips._LPIPS(pretrained=True, net="vgg", pnet_rand=True)
    ours = load_lpips(str(tmp_path / "vgg.safetensors"), device=torch.device("cpu"), key="validate.lpips")
    image, original = torch.rand(2, 2, 3, 32, 48)
    with torch.no_grad():
        wanted = theirs(image, original, normalize=True).flatten()
    assert (wanted > 0.01).all()
    alone = ReconstructionQuality(multiple=None, lpips=ours)(image, original)
    assert alone.keys() == {"lpips"}
    torch.testing.assert_close(alone["lpips"], wanted, rtol=1e-3, atol=1e-5)
    assert "lpips" in ReconstructionQuality(multiple=16, lpips=ours)(image, original)
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="validate.lpips=.*features.0.weight of VGG-16 is not there"):
        load_lpips(str(tmp_path / "other.safetensors"), device=torch.device("cpu"), key="validate.lpips")
