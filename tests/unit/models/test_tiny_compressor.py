import pytest
import torch

from cascade_train.models.tiny_compressor import TinyCompressor, TinyPreviewer, patch_basis

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compressor() -> TinyCompressor:
    compressor = TinyCompressor()
    compressor.build(device=CPU)
    return compressor


@pytest.fixture(scope="module")
def previewer() -> TinyPreviewer:
    previewer = TinyPreviewer()
    previewer.build(device=CPU)
    return previewer


def test_basis_is_orthonormal() -> None:
    basis, scale = patch_basis()
    assert basis.shape == (16, 3, 32, 32)
    assert scale.shape == (16,)
    torch.testing.assert_close(basis.flatten(1) @ basis.flatten(1).T, torch.eye(16), atol=5e-6, rtol=0)


def test_latents_survive_the_way_to_pictures_and_back(compressor: TinyCompressor, previewer: TinyPreviewer) -> None:
    latent = torch.randn(2, 16, 3, 4)
    image = previewer.decode(latent)
    assert image.shape == (2, 3, 96, 128)
    torch.testing.assert_close(compressor.encode(image), latent, atol=1e-4, rtol=0)


def test_plain_colours_survive_the_way_to_latents_and_back(
    compressor: TinyCompressor, previewer: TinyPreviewer
) -> None:
    image = torch.rand(4, 3, 1, 1).expand(4, 3, 64, 64)
    torch.testing.assert_close(previewer.decode(compressor.encode(image)), image, atol=1e-5, rtol=0)


def test_latents_of_shapes_have_about_unit_variance(compressor: TinyCompressor) -> None:
    from cascade_train.data.shapes import Shapes

    shapes = Shapes(
        image_size=96, crop="center", shuffle_window_shards=1, num_workers=0, worker_start="fork", samples=200, seed=0
    )
    images = torch.stack([torch.tensor(shapes.read(row).image) for row in range(200)]).permute(0, 3, 1, 2) / 255
    std = compressor.encode(images).std(dim=(0, 2, 3))
    assert 0.5 < std.min() < std.max() < 1.5


def test_sides_that_hold_no_whole_patches_are_refused(compressor: TinyCompressor) -> None:
    with pytest.raises(ValueError, match="both sides must be multiples of 32"):
        compressor.encode(torch.rand(1, 3, 96, 100))
