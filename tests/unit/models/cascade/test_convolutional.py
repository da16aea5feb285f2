"""The small compressor and previewer: scale of latents, sizes, and weights that come back."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.convolutional import ConvolutionalCompressor, ConvolutionalPreviewer
from cascade_train.models.formats.export import save_part

CPU = torch.device("cpu")
PARTS = {"semantic_compressor": ConvolutionalCompressor, "previewer": ConvolutionalPreviewer}


def built(part: Any) -> Any:
    part.build(device=CPU)
    return part


def test_latents_are_of_unit_mean_square_at_each_place() -> None:
    compressor = built(ConvolutionalCompressor(weights=None))
    latent = compressor.encode(torch.rand(3, 3, 96, 64))
    assert latent.shape == (3, 16, 3, 2)
    torch.testing.assert_close(latent.square().mean(dim=1), torch.ones(3, 3, 2), rtol=1e-3, atol=1e-3)
    assert (latent[0] - latent[1]).abs().max() > 0.01
    assert not latent.requires_grad
    compressor.module.requires_grad_(requires_grad=True)
    assert compressor.encode(torch.rand(1, 3, 32, 32)).requires_grad


def test_previews_have_the_pictures_size() -> None:
    previewer = built(ConvolutionalPreviewer(weights=None))
    assert previewer.decode(torch.randn(2, 16, 3, 2)).shape == (2, 3, 96, 64)


def test_sides_that_hold_no_whole_latents_are_refused() -> None:
    with pytest.raises(ValueError, match=r"image of 96 x 65 pixels: both sides must be multiples of 32"):
        built(ConvolutionalCompressor(weights=None)).encode(torch.rand(1, 3, 96, 65))


@pytest.mark.parametrize("name", PARTS)
def test_what_a_run_left_is_loaded_by_its_name(name: str, tmp_path: Path) -> None:
    part = built(PARTS[name](weights=None))
    stored = {key: value + 1 for key, value in part.module.state_dict().items()}
    assert save_part(stored, tmp_path / "export" / name) == 0.0
    again = built(PARTS[name](weights=str(tmp_path)))
    assert again.module.state_dict().keys() == stored.keys()
    assert all(torch.equal(value, stored[key]) for key, value in again.module.state_dict().items())
    other = next(each for each in PARTS if each != name)
    with pytest.raises(ConfigError, match=rf"this run has left no export/{other}, only {name}"):
        built(PARTS[other](weights=str(tmp_path)))
    with pytest.raises(ConfigError, match=rf"model.{other}.weights=.*not the weights of this model"):
        built(PARTS[other](weights=str(tmp_path / "export" / name / "model.safetensors")))
