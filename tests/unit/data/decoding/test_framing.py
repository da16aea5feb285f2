from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as float_path

from cascade_train.data.decoding.framing import (
    Box,
    Framed,
    Framing,
    largest_box,
    salient_offset,
    spectral_residual,
)
from cascade_train.data.sample import UnreadableSampleError
from tests.unit.data.decoding.test_decode import encode, halves, photo


def draw(purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(purpose.encode()))


def framed(
    image: bytes | np.ndarray, height: int, width: int, mask: bytes | np.ndarray | None = None, **options: object
) -> Framed:
    framing = Framing(**{"crop": "center", "flip_prob": 0.0, "max_pixels": None, **options})  # type: ignore[arg-type]
    return framing(image, mask, height, width, draw)


def psnr(pixels: np.ndarray, reference: torch.Tensor) -> float:
    """Return dB between (3, H, W) uint8 and float in [0, 1]."""
    return float(-10 * torch.log10((torch.from_numpy(pixels).double() / 255 - reference.double()).square().mean()))


def in_float(encoded: bytes, height: int, width: int) -> torch.Tensor:
    """Return PIL's pixels cut and resized in float, as the original did; (3, height, width) in [0, 1]."""
    image = float_path.to_tensor(Image.open(io.BytesIO(encoded)).convert("RGB"))
    box = largest_box(image.shape[1:], (height, width), (0.5, 0.5))
    part = image[:, box.top : box.top + box.height, box.left : box.left + box.width]
    return float_path.resize(part, [height, width], antialias=True)


@pytest.mark.parametrize(("quality", "height", "width"), [(75, 768, 768), (95, 640, 864)])
def test_pixels_are_those_of_the_float_path_to_57_db(quality: int, height: int, width: int) -> None:
    encoded = encode(photo(1600, 1200), "jpeg", quality=quality)
    assert psnr(framed(encoded, height, width).image, in_float(encoded, height, width)) >= 57.0


def test_the_original_order_of_resize_and_crop_gives_the_same() -> None:
    """1600 x 1200 to a square of 768: resized to 1024 x 768 and cropped."""
    encoded = encode(photo(1600, 1200, seed=1), "jpeg", quality=90)
    whole = float_path.resize(float_path.to_tensor(Image.open(io.BytesIO(encoded))), [768], antialias=True)
    assert psnr(framed(encoded, 768, 768).image, whole[:, :, 128:896]) >= 57.0


def test_a_crop_has_the_documented_shape() -> None:
    result = framed(encode(halves(), "png"), 8, 12)
    assert (result.image.shape, result.image.dtype) == ((3, 8, 12), np.uint8)
    assert (result.size, result.box) == ((20, 40), Box(top=0, left=5, height=20, width=30))
    assert result.mask is None


@pytest.mark.parametrize("flip_prob", [0.0, 1.0])
@pytest.mark.parametrize("crop", ["center", "random", "saliency"])
@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_odd_sizes_are_covered_not_padded(kind: str, crop: str, flip_prob: float) -> None:
    for size in ((1, 1), (1, 500), (500, 1), (3, 3), (101, 99), (2000, 3)):
        image = Image.new("RGB", size, (120, 60, 30))
        pixels = framed(encode(image, kind), 16, 24, crop=crop, flip_prob=flip_prob).image
        assert pixels.shape == (3, 16, 24)
        assert np.abs(pixels.reshape(3, -1).astype(int) - np.array([[120], [60], [30]])).max() <= 2


@pytest.mark.parametrize("seed", range(20))
def test_a_box_lies_in_the_picture_and_has_the_targets_shape(seed: int) -> None:
    draws = np.random.default_rng(seed)
    size, target = (tuple(draws.integers(1, 3000, 2).tolist()) for _ in range(2))
    box = largest_box(size, target, tuple(draws.random(2)))
    assert box.height >= 1 <= box.width
    assert 0 <= box.top <= size[0] - box.height
    assert 0 <= box.left <= size[1] - box.width
    assert size[0] == box.height or size[1] == box.width
    assert abs(box.width - box.height * target[1] / target[0]) <= 1 + target[1] / target[0]
    small = tuple(max(1, side // 8) for side in size)
    part = box.scaled(size, small)
    assert 0 <= part.top <= part.top + part.height <= small[0]
    assert 0 <= part.left <= part.left + part.width <= small[1]
    assert min(part.height, part.width) >= 1


def test_a_fraction_of_a_large_jpeg_shows_the_same_part() -> None:
    encoded = encode(photo(2400, 1603), "jpeg", quality=80)
    for height, width in ((160, 160), (200, 120)):
        assert psnr(framed(encoded, height, width).image, in_float(encoded, height, width)) > 40.0


@pytest.mark.parametrize("crop", ["center", "random", "saliency"])
def test_a_mirrored_picture_is_the_mirror_of_the_other(crop: str) -> None:
    encoded = encode(photo(300, 200), "png")
    plain, mirrored = (framed(encoded, 64, 64, crop=crop, flip_prob=prob) for prob in (0.0, 1.0))
    assert plain.box == mirrored.box
    assert np.abs(plain.image.astype(int) - mirrored.image[:, :, ::-1]).max() <= 1


def test_mirroring_is_drawn_by_its_share() -> None:
    framing = Framing(crop="center", flip_prob=0.25, max_pixels=None)
    pixels = np.asarray(halves(16, 16))
    draws = [lambda _, seed=seed: torch.Generator().manual_seed(seed) for seed in range(400)]
    assert 60 <= sum(framing(pixels, None, 16, 16, each).image[0, 0, 0] == 0 for each in draws) <= 140


def test_a_mask_is_cut_and_mirrored_like_its_picture() -> None:
    picture = halves(60, 30)
    mask = Image.fromarray((np.asarray(picture)[:, :, 0] > 100).astype(np.uint8) * 255)
    for crop in ("center", "random", "saliency"):
        for flip_prob in (0.0, 1.0):
            for given in (encode(mask, "png"), encode(mask.convert("1"), "png"), np.asarray(mask)):
                result = framed(encode(picture, "png"), 16, 16, given, crop=crop, flip_prob=flip_prob)
                assert result.mask is not None
                assert (result.mask.shape, result.mask.dtype) == ((1, 16, 16), np.uint8)
                assert np.abs(result.mask[0] / 255 - result.image[0] / 200).max() < 0.02


def test_what_is_transparent_in_a_mask_does_not_count() -> None:
    mask = Image.new("RGBA", (40, 20), (255, 255, 255, 0))
    mask.paste((255, 255, 255, 255), (0, 0, 20, 20))
    result = framed(encode(halves(), "png"), 20, 40, encode(mask, "png"))
    assert result.mask is not None
    assert result.mask[0, 0].tolist() == [255] * 20 + [0] * 20


def test_a_mask_of_another_size_is_unreadable() -> None:
    with pytest.raises(UnreadableSampleError, match="the mask is 30 x 20 px, the picture 40 x 20: they must be equal"):
        framed(encode(halves(), "png"), 8, 8, np.zeros((20, 30), dtype=np.uint8))


def test_pixels_of_a_source_are_not_written_to() -> None:
    pixels = np.asarray(halves())  # PIL's arrays cannot be written to; torch warns when it is given one
    assert not pixels.flags.writeable
    assert framed(pixels, 20, 20).image.max() == 200
    assert framed(pixels, 20, 40).image.max() == 200
    assert framed(pixels, 7, 9, np.asarray(halves().convert("L"))).image.max() == 200


def scene(left: int, top: int, width: int = 400, height: int = 200, side: int = 24) -> np.ndarray:
    """One bright square on a background of soft waves."""
    y, x = np.mgrid[:height, :width]
    pixels = 100 + 10 * np.sin(x / 9) + 10 * np.sin(y / 7)
    pixels[top : top + side, left : left + side] = 250
    return np.repeat(pixels[:, :, None], 3, axis=2).astype(np.uint8)


@pytest.mark.parametrize("left", [0, 40, 180, 330, 376])
@pytest.mark.parametrize("turned", [False, True])
def test_what_stands_out_is_in_the_crop(left: int, turned: bool) -> None:
    pixels = scene(left, 90)
    pixels = np.ascontiguousarray(pixels.transpose(1, 0, 2)) if turned else pixels
    framed = Framing(crop="saliency", flip_prob=0.0, max_pixels=None)(pixels, None, 64, 64, draw)
    start = framed.box.top if turned else framed.box.left
    assert start <= left
    assert left + 24 <= start + 200


def test_the_residual_is_highest_at_the_object() -> None:
    saliency = spectral_residual(scene(20, 20, 64, 64, 6)[:, :, 0].astype(float))
    top, left = np.unravel_index(saliency.argmax(), saliency.shape)
    assert saliency.shape == (64, 64)
    assert saliency.min() >= 0
    assert 16 <= top <= 30
    assert 16 <= left <= 30


@pytest.mark.parametrize("value", [0, 255])
def test_a_plain_picture_is_cut_in_the_middle(value: int) -> None:
    pixels = np.full((100, 300, 3), value, dtype=np.uint8)
    assert salient_offset(pixels, 100, 100) == (0.5, 0.5)
