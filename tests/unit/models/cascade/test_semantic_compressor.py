from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.semantic_compressor import IMAGENET_MEAN, IMAGENET_STD, EfficientNetCompressor

CPU = torch.device("cpu")


def built(weights: str | None) -> EfficientNetCompressor:
    compressor = EfficientNetCompressor(weights=weights)
    compressor.build(device=CPU)
    return compressor


@pytest.fixture(scope="module")
def compressor() -> EfficientNetCompressor:
    return built(None)


def test_it_has_the_originals_size_and_names(compressor: EfficientNetCompressor) -> None:
    module = compressor.module
    assert sum(p.numel() for p in module.parameters()) == 20_197_968
    assert len(module.state_dict()) == 784
    assert {name.split(".")[0] for name in module.state_dict()} == {"backbone", "mapper"}
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize(("pixels", "latents"), [(64, 2), (96, 3), (65, 3)])
def test_stride_is_32(compressor: EfficientNetCompressor, pixels: int, latents: int) -> None:
    latent = compressor.encode(torch.rand(1, 3, pixels, 32))
    assert latent.shape == (1, 16, latents, 1)
    assert latent.dtype == torch.float32
    assert not latent.requires_grad


def test_images_are_normalised_inside(compressor: EfficientNetCompressor) -> None:
    image = torch.rand(1, 3, 64, 64)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    with torch.no_grad():
        assert torch.equal(compressor.encode(image), compressor.module((image - mean) / std))


def test_seeded_latents_are_of_use(compressor: EfficientNetCompressor) -> None:
    latent = compressor.encode(torch.rand(4, 3, 96, 96))
    assert 0.05 < latent.std() < 20


def test_stored_weights_are_loaded(compressor: EfficientNetCompressor, tmp_path: Path) -> None:
    changed = {
        name: value + 1 if name == "mapper.0.weight" else value
        for name, value in compressor.module.state_dict().items()
    }
    save_file(changed, tmp_path / "effnet.safetensors")
    loaded = built(str(tmp_path / "effnet.safetensors"))
    assert torch.equal(loaded.module.mapper[0].weight, compressor.module.mapper[0].weight + 1)
    assert loaded.encode(torch.rand(1, 3, 32, 32)).isfinite().all()
    loaded.forget_weights()
    loaded.build(device=CPU)
    assert torch.equal(loaded.module.mapper[0].weight, compressor.module.mapper[0].weight)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.semantic_compressor\.weights="):
        built(str(tmp_path / "gone.safetensors"))
