from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.previewer import ConvolutionPreviewer

CPU = torch.device("cpu")


def built(weights: str | None) -> ConvolutionPreviewer:
    previewer = ConvolutionPreviewer(weights=weights)
    previewer.build(device=CPU)
    return previewer


@pytest.fixture(scope="module")
def previewer() -> ConvolutionPreviewer:
    return built(None)


def test_it_has_the_originals_size(previewer: ConvolutionPreviewer) -> None:
    assert sum(p.numel() for p in previewer.module.parameters()) == 3_979_651
    assert not any(p.requires_grad for p in previewer.module.parameters())


def test_a_latent_position_becomes_eight_pixels(previewer: ConvolutionPreviewer) -> None:
    image = previewer.decode(torch.randn(1, 16, 2, 3).bfloat16())
    assert image.shape == (1, 3, 16, 24)
    assert image.dtype == torch.float32
    assert not image.requires_grad
    assert image.isfinite().all()


def test_stored_weights_are_loaded(previewer: ConvolutionPreviewer, tmp_path: Path) -> None:
    state = previewer.module.state_dict()
    save_file(state | {"blocks.24.bias": state["blocks.24.bias"] + 1}, tmp_path / "previewer.safetensors")
    latent = torch.randn(1, 16, 2, 2)
    loaded = built(str(tmp_path / "previewer.safetensors"))
    torch.testing.assert_close(loaded.decode(latent), previewer.decode(latent) + 1)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.previewer\.weights="):
        built(str(tmp_path / "gone.safetensors"))
