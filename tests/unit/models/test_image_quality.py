"""How near a reconstruction comes, what a stage has to beat, and how well pictures fit captions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_features_to_statistics, fid_statistics_to_metric

from cascade_train.errors import ConfigError
from cascade_train.models.image_quality import (
    ClipScore,
    FeatureDistance,
    ReconstructionQuality,
    frechet_distance,
    image_quality,
    load_inception,
    load_lpips,
    psnr,
    resize_clean,
)
from cascade_train.models.text_encoder import PACKAGED_TOKENIZER
from cascade_train.results.evaluation.measures import load_tiny_features
from tests.unit.models.inception import untrained_inception

CPU = torch.device("cpu")


def test_psnr_is_that_of_a_known_error() -> None:
    original = torch.full((2, 3, 16, 16), 0.5)
    image = original + torch.tensor([0.1, 0.01]).view(2, 1, 1, 1)
    assert psnr(image, original).tolist() == pytest.approx([20.0, 40.0], abs=1e-3)
    same = image_quality(original, original)
    assert (same["psnr"].tolist(), same["ssim"].tolist()) == ([100.0, 100.0], [1.0, 1.0])
    brighter = image_quality(original + 0.1, original)["ssim"].tolist()
    assert brighter == pytest.approx([(2 * 0.5 * 0.6 + 1e-4) / (0.25 + 0.36 + 1e-4)] * 2, abs=1e-3)


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
    means = np.linspace(0, 1, 32).reshape(4, 8).mean(axis=1)
    again = np.interp(np.arange(32), np.arange(4) * 8 + 3.5, means)  # constant beyond the middles of its ends
    error = ((again - np.linspace(0, 1, 32)) ** 2).mean()
    assert found["psnr_bilinear"][2].item() == pytest.approx(-10 * np.log10(error), abs=1e-3)


@pytest.fixture(scope="module")
def vgg(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, str]:
    """The features of a VGG-16 that nobody trained, and their file."""
    from torchvision.models.vgg import cfgs, make_layers

    torch.manual_seed(0)
    features, file = make_layers(cfgs["D"]), tmp_path_factory.mktemp("vgg") / "vgg.safetensors"
    save_file({f"features.{name}": value for name, value in features.state_dict().items()}, file)
    return features, str(file)


def test_the_distance_of_features_is_zero_at_the_original_and_has_a_gradient(vgg: tuple[nn.Module, str]) -> None:
    distance = FeatureDistance(vgg[1], device=CPU)
    images = torch.rand(2, 3, 16, 24)
    assert distance(images, images).tolist() == [0.0, 0.0]
    other = torch.rand(2, 3, 16, 24, requires_grad=True)
    found = distance(other, images)
    assert found.shape == (2,)
    assert (found > 0).all()
    found.sum().backward()
    assert other.grad.abs().sum() > 0


def test_lpips_is_that_of_torchmetrics(
    vgg: tuple[nn.Module, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchmetrics.functional.image import lpips

    features, file = vgg
    monkeypatch.setattr(lpips, "_get_tv_model_features", lambda net, pretrained: features)
    theirs = lpips._LPIPS(pretrained=True, net="vgg", pnet_rand=True)
    ours = load_lpips(file, device=CPU, key="validate.lpips")
    image, original = torch.rand(2, 2, 3, 32, 48)
    with torch.no_grad():
        wanted = theirs(image, original, normalize=True).flatten()
    assert (wanted > 0.01).all()
    alone = ReconstructionQuality(multiple=None, lpips=ours)(image, original)
    assert alone.keys() == {"lpips"}
    torch.testing.assert_close(alone["lpips"], wanted, rtol=1e-3, atol=1e-5)
    assert "lpips" in ReconstructionQuality(multiple=16, lpips=ours)(image, original)
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="validate.lpips=.*: not the features of VGG-16 .*0.weight.*1 unexpected: a"):
        load_lpips(str(tmp_path / "other.safetensors"), device=CPU, key="validate.lpips")


def test_features_are_those_of_the_library(tmp_path: Path) -> None:
    theirs = untrained_inception()
    torch.save(theirs.state_dict(), tmp_path / "inception.pth")
    features = load_inception(str(tmp_path / "inception.pth"), device=CPU, key="validate.rfid")
    image = torch.rand(2, 3, 40, 48, generator=torch.Generator().manual_seed(0))
    found = features(image * 1.5 - 0.25)
    assert found.shape == (2, 2048)
    assert (found[0] - found[1]).abs().max() > 0
    pixels = ((image * 1.5 - 0.25).clamp(0, 1) * 255).round().byte()
    assert torch.equal(found, theirs(pixels)[0])


def test_a_picture_is_resized_antialiased_as_clean_fid_does(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (3, 64, 48), generator=generator).byte()
    for side in (20, 99):
        bicubic = {"mode": "bicubic", "antialias": True, "align_corners": False}
        wanted = torch.nn.functional.interpolate(pixels[None].double(), (side, side), **bicubic)[0].clamp(0, 255)
        small = resize_clean(pixels, side)
        assert small.shape == (3, side, side)
        assert small.max() <= 255
        assert (small != small.round()).any(), "nothing is rounded"
        torch.testing.assert_close(small.double(), wanted, atol=1e-3, rtol=0)
    whole = torch.randint(256, (1, 3, 299, 299), generator=generator)
    assert torch.equal(resize_clean(whole[0].byte()), whole[0].float())
    theirs = untrained_inception()
    save_file(theirs.state_dict(), tmp_path / "inception.safetensors")
    features = load_inception(str(tmp_path / "inception.safetensors"), device=CPU, key="features", antialias=True)
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
        load_inception(str(tmp_path / "other.safetensors"), device=CPU, key="validate.rfid")
    (tmp_path / "page.pth").write_text("<html>Sign in")
    for load, wanted in ((load_inception, "weights-inception-2015-12-05"), (load_lpips, "vgg16-397923af")):
        with pytest.raises(ConfigError, match=f"features=.*page.pth: .*and no web page.*Give .*{wanted}.*, or null"):
            load(str(tmp_path / "page.pth"), device=CPU, key="features")
    monkeypatch.setattr("cascade_train.models.image_quality.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"by the library torchmetrics, which is not .*--editable '\.\[metrics\]'"):
        load_lpips("vgg.safetensors", device=CPU, key="validate.lpips")
    with pytest.raises(ConfigError, match=r"is measured by the library torch-fidelity, .*--editable '\.\[metrics\]'"):
        load_inception(str(tmp_path / "other.safetensors"), device=CPU, key="validate.rfid")


@pytest.mark.parametrize("count", [8, 200])
def test_the_distance_is_that_of_the_library(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sets = [torch.randn(count, 12, generator=generator, dtype=torch.float64) * scale + scale for scale in (1.0, 1.3)]
    wanted = fid_statistics_to_metric(*map(fid_features_to_statistics, sets), verbose=False)[KEY_METRIC_FID]
    moments = [moment for each in sets for moment in (each.mean(dim=0), each.T.cov())]
    assert frechet_distance(*moments).item() == pytest.approx(wanted, rel=1e-6)
    assert wanted > 0.5
    assert frechet_distance(*moments[:2], *moments[:2]).item() == pytest.approx(0.0, abs=1e-6)


CAPTIONS = ["a red circle", "a blue star on a green background, which is a longer caption"]


def tiny_clip(folder: Path) -> str:
    """Write a tiny CLIP with the packaged tokenizer, as transformers stores one, and return the folder."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(PACKAGED_TOKENIZER)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": len(tokenizer), "max_position_embeddings": 48}
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text | special, vision_config=vision, projection_dim=8))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn_like(value))
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return str(folder)


class Adapter:
    """Gives torchmetrics the embeddings, where transformers 5 returns them within an output."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config

    def to(self, device: torch.device) -> Adapter:
        return self

    def get_image_features(self, pixels: Tensor) -> Tensor:
        return self.model.get_image_features(pixels).pooler_output

    def get_text_features(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model.get_text_features(ids, mask).pooler_output


def library_score(score: ClipScore, images: list[Tensor], captions: list[str]) -> float:
    """Return what torchmetrics makes of pictures and captions with the same CLIP."""
    from torchmetrics.functional.multimodal import clip_score

    made = (Adapter(score._model), score._processor)
    return float(clip_score(images, captions, model_name_or_path=lambda: made))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_clip(tmp_path_factory.mktemp("clip"))


def test_the_score_is_that_of_torchmetrics(clip: str) -> None:
    score = ClipScore(clip, device=CPU, key="clip")
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(256, (3, 40, 48), generator=generator).byte() for _ in CAPTIONS]
    score_B = score(images, CAPTIONS)
    assert score_B.shape == (2,)
    assert abs(score_B[0] - score_B[1]) > 0.1
    for image, caption, own in zip(images, CAPTIONS, score_B.tolist(), strict=True):
        assert max(0.0, own) == pytest.approx(library_score(score, [image], [caption]), abs=1e-3)
    long = score(images[:1], [" ".join(["circle"] * 60)])
    assert long.isfinite().all(), "a caption that is too long is cut"


def test_only_a_folder_with_a_whole_clip_is_taken(clip: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="clip=openai/clip: no such folder. Name a local folder of a CLIP"):
        ClipScore("openai/clip", device=CPU, key="clip")
    with pytest.raises(ConfigError, match="clip=.*: is no whole CLIP of transformers, with weights, preprocessor"):
        ClipScore(str(tmp_path), device=CPU, key="clip")
    shutil.copytree(clip, tmp_path / "clip", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ConfigError, match="clip=.*: its tokenizer is missing"):
        ClipScore(str(tmp_path / "clip"), device=CPU, key="clip")
