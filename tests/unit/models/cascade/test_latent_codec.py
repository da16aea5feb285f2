"""Stage A as a codec: the original's scale, its file's names, and images back from latents."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cascade_train.errors import ConfigError
from cascade_train.models.cascade.latent_codec import VQGAN

CPU = torch.device("cpu")
SMALL = {"levels": 2, "bottleneck_blocks": 1, "embed_dim": 16, "latent_channels": 4, "num_vq_embeddings": 32}


def codec(**changed: Any) -> VQGAN:
    return VQGAN(**({"weights": None, "scale_factor": 0.43} | SMALL | changed))


@pytest.fixture(scope="module")
def built() -> VQGAN:
    vqgan = codec()
    vqgan.build(device=CPU)
    return vqgan


def test_four_pixels_are_one_latent_and_back(built: VQGAN) -> None:
    image = torch.rand(2, 3, 32, 48)
    latent = built.encode(image)
    assert latent.shape == (2, 4, 8, 12)
    assert latent.dtype == torch.float32
    decoded = built.decode(latent)
    assert decoded.shape == image.shape
    assert not latent.requires_grad
    assert not decoded.requires_grad
    assert not built.module.training
    other = codec(scale_factor=0.86)
    other.build(device=CPU)
    torch.testing.assert_close(2 * other.encode(image), latent)
    torch.testing.assert_close(other.decode(other.encode(image)), decoded)


def test_files_with_the_originals_names_and_folders_of_diffusers_load(built: VQGAN, tmp_path: Path) -> None:
    state = {name: value + 0.01 for name, value in built.module.state_dict().items() if value.is_floating_point()}
    state |= {name: value for name, value in built.module.state_dict().items() if name not in state}
    renamed = {name.replace("vquantizer.embedding.", "vquantizer.codebook."): value for name, value in state.items()}
    assert renamed.keys() != state.keys()
    save_file(renamed, tmp_path / "stage_a.safetensors")
    (tmp_path / "pipeline" / "vqgan").mkdir(parents=True)
    save_file(state, tmp_path / "pipeline" / "vqgan" / "diffusion_pytorch_model.safetensors")
    for source in (tmp_path / "stage_a.safetensors", tmp_path / "pipeline", tmp_path / "pipeline" / "vqgan"):
        loaded = codec(weights=str(source))
        loaded.build(device=CPU)
        assert all(torch.equal(loaded.module.state_dict()[name], value) for name, value in state.items())


def test_weights_of_another_stage_a_and_a_scale_of_zero_are_refused(built: VQGAN, tmp_path: Path) -> None:
    save_file(built.module.state_dict(), tmp_path / "a.safetensors")
    other = codec(weights=str(tmp_path / "a.safetensors"), embed_dim=32)
    with pytest.raises(ConfigError, match="model.stage_a.weights=.*this model needs"):
        other.build(device=CPU)
    with pytest.raises(ValueError, match="stage_a.scale_factor=0.0 must be greater than 0"):
        codec(scale_factor=0.0)
