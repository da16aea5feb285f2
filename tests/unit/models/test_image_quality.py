"""How near a reconstruction comes, and what a stage has to beat."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_features_to_statistics, fid_statistics_to_metric

from cascade_train.errors import ConfigError
from cascade_train.models.image_quality import (
    ReconstructionQuality,
    frechet_distance,
    image_quality,
    load_inception,
    load_lpips,
    psnr,
    resized_clean,
)
from cascade_train.results.evaluation.measures import load_tiny_features
from tests.unit.models.inception import untrained_inception


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
    with pytest.raises(ConfigError, match="validate.lpips=.*features.0.weight of VGG-16 is not there.*but a is"):
        load_lpips(str(tmp_path / "other.safetensors"), device=torch.device("cpu"), key="validate.lpips")


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_features_are_those_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    theirs, file = untrained_inception(monkeypatch), tmp_path / f"inception.{ending}"
    (torch.save if ending == "pth" else save_file)(theirs.state_dict(), file)
    features = load_inception(str(file), device=torch.device("cpu"), key="validate.rfid")
    image = torch.rand(2, 3, 40, 48, generator=torch.Generator().manual_seed(0))
    found = features(image * 1.5 - 0.25)
    assert found.shape == (2, 2048)
    assert (found[0] - found[1]).abs().max() > 0
    pixels = ((image * 1.5 - 0.25).clamp(0, 1) * 255).round().byte()
    assert torch.equal(found, theirs(pixels)[0])


def test_a_picture_is_resized_antialiased_as_clean_fid_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (3, 64, 48), generator=generator).byte()
    for side in (20, 99):
        bicubic = {"mode": "bicubic", "antialias": True, "align_corners": False}
        wanted = torch.nn.functional.interpolate(pixels[None].double(), (side, side), **bicubic)[0].clamp(0, 255)
        small = resized_clean(pixels, side)
        assert small.shape == (3, side, side)
        assert small.max() <= 255
        assert (small != small.round()).any(), "nothing is rounded"
        torch.testing.assert_close(small.double(), wanted, atol=1e-3, rtol=0)
    whole = torch.randint(256, (1, 3, 299, 299), generator=generator)
    assert torch.equal(resized_clean(whole[0].byte()), whole[0].float())
    theirs = untrained_inception(monkeypatch)
    save_file(theirs.state_dict(), tmp_path / "inception.safetensors")
    features = load_inception(
        str(tmp_path / "inception.safetensors"), device=torch.device("cpu"), key="features", antialias=True
    )
    torch.testing.assert_close(features(whole / 255), theirs(whole.byte())[0])


def test_features_of_the_tiny_compressor_tell_pictures_apart() -> None:
    features = load_tiny_features(torch.device("cpu"))
    image = torch.rand(2, 3, 40, 48, generator=torch.Generator().manual_seed(0))
    found = features(image)
    assert found.shape == (2, 64)
    assert (found[0] - found[1]).abs().max() > 0.01


def test_another_network_is_refused_and_so_is_a_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="validate.rfid=.*is not FID's Inception V3, but holds a;"):
        load_inception(str(tmp_path / "other.safetensors"), device=torch.device("cpu"), key="validate.rfid")
    (tmp_path / "page.pth").write_text("<html>Sign in")
    for load, wanted in ((load_inception, "weights-inception-2015-12-05"), (load_lpips, "vgg16-397923af")):
        with pytest.raises(ConfigError, match=f"features=.*page.pth: .*is a web page.*Give .*{wanted}.*, or null"):
            load(str(tmp_path / "page.pth"), device=torch.device("cpu"), key="features")
    monkeypatch.setattr("cascade_train.models.image_quality.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"torch-fidelity, which is not installed.*--editable '\.\[metrics\]'"):
        load_inception(str(tmp_path / "other.safetensors"), device=torch.device("cpu"), key="validate.rfid")


@pytest.mark.parametrize("count", [8, 200])
def test_the_distance_is_that_of_the_library(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sets = [torch.randn(count, 12, generator=generator, dtype=torch.float64) * scale + scale for scale in (1.0, 1.3)]
    wanted = fid_statistics_to_metric(*map(fid_features_to_statistics, sets), verbose=False)[KEY_METRIC_FID]
    moments = [moment for each in sets for moment in (each.mean(dim=0), each.T.cov())]
    assert frechet_distance(*moments).item() == pytest.approx(wanted, rel=1e-6)
    assert wanted > 0.5
    assert frechet_distance(*moments[:2], *moments[:2]).item() == pytest.approx(0.0, abs=1e-6)


def test_the_distance_of_shifted_normals_is_the_square_of_the_shift() -> None:
    mean, covariance = torch.zeros(3, dtype=torch.float64), torch.diag(torch.tensor([1.0, 4.0, 0.0])).double()
    assert frechet_distance(mean, covariance, mean + 2, covariance).item() == pytest.approx(12.0)
    assert frechet_distance(mean, covariance, mean, 4 * covariance).item() == pytest.approx(1.0 + 4.0)
