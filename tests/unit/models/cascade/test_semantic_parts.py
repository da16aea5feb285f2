"""Compressors and previewers: the original's and the small ones; sizes, scale of latents, weights that come back."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.convolutional import ConvolutionalCompressor, ConvolutionalPreviewer
from cascade_train.models.cascade.previewer import ConvolutionPreviewer
from cascade_train.models.cascade.semantic_compressor import IMAGENET_MEAN, IMAGENET_STD, EfficientNetCompressor
from cascade_train.models.formats.export import save_part

PARTS = {"semantic_compressor": ConvolutionalCompressor, "previewer": ConvolutionalPreviewer}
OTHER = {"semantic_compressor": "previewer", "previewer": "semantic_compressor"}


def built(part: Any, weights: Path | None = None) -> Any:
    made = part(weights=None if weights is None else str(weights))
    made.build(device=torch.device("cpu"))
    return made


@pytest.fixture(scope="module")
def compressor() -> EfficientNetCompressor:
    return built(EfficientNetCompressor)


def test_the_originals_compressor_has_its_size_and_names(compressor: EfficientNetCompressor) -> None:
    module = compressor.module
    assert sum(p.numel() for p in module.parameters()) == 20_197_968
    assert len(module.state_dict()) == 784
    assert {name.split(".")[0] for name in module.state_dict()} == {"backbone", "mapper"}
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize(("pixels", "latents"), [(64, 2), (96, 3), (65, 3)])
def test_its_stride_is_32_and_images_are_normalised_inside(
    compressor: EfficientNetCompressor, pixels: int, latents: int
) -> None:
    image = torch.rand(2, 3, pixels, 32)
    latent = compressor.encode(image)
    assert latent.shape == (2, 16, latents, 1)
    assert latent.dtype == torch.float32
    assert 0.05 < latent.std() < 20
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    with torch.no_grad():
        assert torch.equal(latent, compressor.module((image - mean) / std))


def test_its_weights_train_in_bf16_beside_statistics_in_fp32() -> None:
    module = built(EfficientNetCompressor).module.requires_grad_(requires_grad=True)
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    module(torch.rand(1, 3, 64, 64).bfloat16()).square().sum().backward()
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float32, torch.int64}
    assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())


def test_the_originals_previewer_has_its_size_and_makes_eight_pixels_of_a_position() -> None:
    previewer = built(ConvolutionPreviewer)
    assert sum(p.numel() for p in previewer.module.parameters()) == 3_979_651
    image = previewer.decode(torch.randn(1, 16, 2, 3).bfloat16())
    assert image.shape == (1, 3, 16, 24)
    assert image.dtype == torch.float32
    assert not image.requires_grad
    assert image.isfinite().all()


def test_small_latents_are_of_unit_mean_square_at_each_place() -> None:
    small = built(ConvolutionalCompressor)
    latent = small.encode(torch.rand(3, 3, 96, 64))
    assert latent.shape == (3, 16, 3, 2)
    torch.testing.assert_close(latent.square().mean(dim=1), torch.ones(3, 3, 2), rtol=1e-3, atol=1e-3)
    assert (latent[0] - latent[1]).abs().max() > 0.01
    assert not latent.requires_grad
    small.module.requires_grad_(requires_grad=True)
    assert small.encode(torch.rand(1, 3, 32, 32)).requires_grad
    assert built(ConvolutionalPreviewer).decode(latent).shape == (3, 3, 96, 64)
    with pytest.raises(ValueError, match=r"image of 96 x 65 pixels: both sides must be multiples of 32"):
        small.encode(torch.rand(1, 3, 96, 65))


@pytest.mark.parametrize("name", PARTS)
def test_what_a_run_left_is_loaded_by_its_name(name: str, tmp_path: Path) -> None:
    part, other = built(PARTS[name]), OTHER[name]
    stored = {key: value + 1 for key, value in part.module.state_dict().items()}
    assert save_part(stored, tmp_path / "export" / name) == 0.0
    again = built(PARTS[name], tmp_path)
    assert again.module.state_dict().keys() == stored.keys()
    assert all(torch.equal(value, stored[key]) for key, value in again.module.state_dict().items())
    again.forget_weights()
    again.build(device=torch.device("cpu"))
    assert all(torch.equal(value + 1, stored[key]) for key, value in again.module.state_dict().items())
    for weights, message in (
        (tmp_path, f"this run has left no export/{other}, only {name}"),
        (tmp_path / "export" / name / "model.safetensors", rf"model.{other}.weights=.*not the weights of this model"),
        (tmp_path / "gone.safetensors", rf"model\.{other}\.weights="),
    ):
        with pytest.raises(ConfigError, match=message):
            built(PARTS[other], weights)
