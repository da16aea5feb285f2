from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cascade_train.data.decode import decode, to_rgb, upright_size
from cascade_train.data.sample import UnreadableSampleError

CENTER = (0.5, 0.5)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def halves(width: int = 40, height: int = 20) -> Image.Image:
    """Left half red, right half blue."""
    image = Image.new("RGB", (width, height), (200, 0, 0))
    image.paste((0, 0, 200), (width // 2, 0, width, height))
    return image


def test_a_crop_has_the_documented_shape() -> None:
    pixels = decode(encode(halves(), "png"), 8, 12, offset=CENTER)
    assert pixels.shape == (3, 8, 12)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous


def test_a_picture_of_the_target_size_is_not_touched() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    assert np.array_equal(decode(pixels, 24, 24, offset=(0.3, 0.9)), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize(("across", "red", "blue"), [(0.0, 200, 0), (1.0, 0, 200)])
def test_the_offset_moves_the_crop_from_edge_to_edge(across: float, red: int, blue: int) -> None:
    pixels = decode(encode(halves(), "png"), 10, 10, offset=(across, 0.5))
    assert np.unique(pixels[0, :, 1:-1]).tolist() == [red]
    assert np.unique(pixels[2, :, 1:-1]).tolist() == [blue]


def test_the_centre_crop_is_symmetric() -> None:
    pixels = decode(encode(halves(), "png"), 10, 10, offset=CENTER)
    assert np.array_equal(pixels[0], pixels[2][:, ::-1])


def test_shrinking_averages_instead_of_picking() -> None:
    board = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)
    pixels = decode(encode(Image.fromarray(board), "png"), 8, 8, offset=CENTER)
    assert np.abs(pixels.astype(int) - 127).max() < 20


@pytest.mark.parametrize(("width", "height"), [(1, 500), (500, 1), (3, 3), (101, 99)])
def test_odd_sizes_are_covered_not_padded(width: int, height: int) -> None:
    image = Image.new("RGB", (width, height), (120, 60, 30))
    pixels = decode(encode(image, "png"), 16, 16, offset=CENTER)
    assert np.array_equal(np.unique(pixels.reshape(3, -1), axis=1).ravel(), [120, 60, 30])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_orientation_is_applied_and_the_size_agrees(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = Image.new("RGB", (32, 16), (0, 0, 0))
    upright.paste((240, 240, 240), (0, 0, 8, 8))  # the upper left corner, once upright
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # PIL's operation that makes `orientation` right again
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation in undo else upright
    encoded = encode(stored, kind, exif=exif)
    assert upright_size(encoded) == (32, 16)
    pixels = decode(encoded, 16, 32, offset=CENTER)
    assert pixels[:, 2:6, 2:6].min() > 200
    assert pixels[:, 10:, 12:].max() < 40


def test_an_unknown_orientation_is_none() -> None:
    exif = Image.Exif()
    exif[0x0112] = 77
    assert upright_size(encode(halves(), "jpeg", exif=exif)) == (40, 20)


def sixteen_bit() -> Image.Image:
    return Image.fromarray(np.full((8, 8), 32896, dtype=np.uint16))


@pytest.mark.parametrize(
    ("image", "kind", "rgb"),
    [
        (Image.new("1", (8, 8), 1), "png", (255, 255, 255)),
        (Image.new("L", (8, 8), 77), "png", (77, 77, 77)),
        (Image.new("LA", (8, 8), (0, 0)), "png", (255, 255, 255)),
        (Image.new("RGBA", (8, 8), (255, 0, 0, 0)), "png", (255, 255, 255)),
        (Image.new("RGBA", (8, 8), (0, 0, 0, 128)), "webp", (127, 127, 127)),
        (Image.new("RGB", (8, 8), (10, 200, 30)).quantize(2), "png", (10, 200, 30)),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "jpeg", (254, 0, 0)),
        (sixteen_bit(), "png", (128, 128, 128)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else None,
)
def test_every_mode_becomes_rgb(image: Image.Image, kind: str, rgb: tuple[int, int, int]) -> None:
    pixels = decode(encode(image, kind), 8, 8, offset=CENTER).reshape(3, -1).astype(int)
    assert np.abs(pixels - np.array(rgb)[:, None]).max() <= 3


def test_a_transparent_palette_lies_on_white() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 200, 0, 0])
    pixels = decode(encode(image, "png", transparency=1), 8, 8, offset=CENTER)
    assert pixels.min() == 255


def test_wide_integers_that_hold_bytes_are_kept() -> None:
    assert to_rgb(Image.new("I", (2, 2), 200)).getpixel((0, 0)) == (200, 200, 200)
    assert to_rgb(Image.new("I", (2, 2), 65535)).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_a_file_cut_short_is_unreadable(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    encoded = encode(Image.fromarray(noise), kind)
    with pytest.raises(UnreadableSampleError, match=r"Error: .+"):
        decode(encoded[: len(encoded) // 2], 8, 8, offset=CENTER)


@pytest.mark.parametrize("encoded", [b"", b"<html>404</html>", b"\x89PNG\r\n\x1a\n" + b"\0" * 50])
def test_what_is_no_picture_is_unreadable(encoded: bytes) -> None:
    with pytest.raises(UnreadableSampleError, match="not a picture of a known format|SyntaxError"):
        decode(encoded, 8, 8, offset=CENTER)
    with pytest.raises(UnreadableSampleError, match="not a picture of a known format|SyntaxError"):
        upright_size(encoded)


def test_a_decompression_bomb_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(UnreadableSampleError, match="DecompressionBomb"):
        decode(encode(halves(), "png"), 8, 8, offset=CENTER)


def test_damaged_metadata_does_not_warn() -> None:
    encoded = encode(halves(), "jpeg", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x09broken")
    assert decode(encoded, 8, 8, offset=CENTER).shape == (3, 8, 8)


def test_lack_of_memory_is_not_blamed_on_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(MemoryError):
        upright_size(b"")
