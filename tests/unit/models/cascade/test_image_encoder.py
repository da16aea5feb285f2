from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from cascade_train.assembly.build import build_node
from cascade_train.errors import ConfigError
from cascade_train.models.cascade.image_encoder import CLIP_MEAN, CLIP_STD, ImageEncoder
from tests.unit.models.stages import model_config

CPU = torch.device("cpu")
SMALL = {
    "weights": None,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 12,
}


def make(**changes: Any) -> ImageEncoder:
    return build_node(model_config("c_3b", {"image_encoder": SMALL | changes}).image_encoder)


def built(**changes: Any) -> ImageEncoder:
    encoder = make(**changes)
    encoder.build(device=CPU, dtype=torch.float32)
    return encoder


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(300, 300), (231, 500), (401, 150), (224, 224)])
def test_preprocessing_is_resize_centre_crop_and_normalise(size: tuple[int, int], antialias: bool) -> None:
    encoder, image = built(antialias=antialias), torch.rand(2, 3, *size)
    original = v2.Compose(
        [
            v2.Resize(224, interpolation=v2.InterpolationMode.BICUBIC, antialias=antialias),
            v2.CenterCrop(224),
            v2.Normalize(CLIP_MEAN, CLIP_STD),
        ]
    )
    torch.testing.assert_close(encoder.preprocess(image), original(image), atol=1e-5, rtol=0)


def test_without_antialiasing_a_detailed_picture_looks_otherwise() -> None:
    across = (torch.arange(768) % 2).float().expand(1, 3, 768, 768)  # stripes of one pixel
    grey = -torch.tensor(CLIP_MEAN).view(3, 1, 1) + 0.5
    grey /= torch.tensor(CLIP_STD).view(3, 1, 1)
    smooth, jagged = (float((built(antialias=each).preprocess(across) - grey).abs().mean()) for each in (True, False))
    assert smooth < 0.05
    assert jagged > 1.0


def test_embeddings_have_a_token_axis_the_towers_dtype_and_no_gradient() -> None:
    encoder = make()
    encoder.build(device=CPU, dtype=torch.bfloat16)
    embedding = encoder.encode(torch.rand(2, 3, 64, 96))
    assert embedding.shape == (2, 1, 12)
    assert embedding.dtype == torch.bfloat16
    assert not embedding.requires_grad
    assert embedding.isfinite().all()
    assert not torch.equal(embedding[0], embedding[1])


def test_stored_weights_are_loaded(tmp_path: Path) -> None:
    encoder = built()
    encoder.module.save_pretrained(tmp_path)
    loaded = built(weights=str(tmp_path))
    image = torch.rand(1, 3, 64, 64)
    assert torch.equal(loaded.encode(image), encoder.encode(image))
    with pytest.raises(ConfigError, match=r"image_encoder\.projection_dim=16 and image_size_px=224"):
        built(weights=str(tmp_path), projection_dim=16)
    with pytest.raises(ConfigError, match=r"image_encoder\.weights=.*is neither a local folder nor a hub id"):
        built(weights=str(tmp_path / "gone"))
