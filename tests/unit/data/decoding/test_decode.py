from __future__ import annotations

import io
import logging
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from cascade_train.data.decoding import decode as decoding
from cascade_train.data.decoding.decode import decode, upright_size
from cascade_train.data.index.cache import picture_facts
from cascade_train.data.sample import UnreadableSampleError

WHOLE = (10**6, 10**6)
"""A target so large that nothing is decoded at a fraction."""


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def halves(width: int = 40, height: int = 20) -> Image.Image:
    """Left half red, right half blue."""
    image = Image.new("RGB", (width, height), (200, 0, 0))
    image.paste((0, 0, 200), (width // 2, 0, width, height))
    return image


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth shapes with grain, as a camera gives them."""
    draws = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3))
    for cells, strength in ((4, 60), (16, 30), (64, 15)):
        coarse = Image.fromarray(draws.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        pixels += strength / 128 * (np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) - 127.5)
    pixels += draws.normal(0, 5, (height, width, 1))
    return Image.fromarray((pixels + 127.5).clip(0, 255).astype(np.uint8))


def pixels_of(encoded: bytes) -> np.ndarray:
    """Decode the whole picture, (H, W, 3)."""
    return decode(encoded, WHOLE, max_pixels=None).pixels


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "tiff"])
def test_orientation_is_applied_and_the_size_agrees(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = Image.new("RGB", (32, 16), (0, 0, 0))
    upright.paste((240, 240, 240), (0, 0, 8, 8))  # the upper left corner, once upright
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # PIL's operation that makes `orientation` right again
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation in undo else upright
    encoded = encode(stored, kind, exif=exif)
    assert upright_size(encoded) == (32, 16)
    pixels = pixels_of(encoded)
    assert pixels.shape == (16, 32, 3)
    assert pixels[2:6, 2:6].min() > 200
    assert pixels[10:, 12:].max() < 40


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def raw_profile(exif: bytes) -> bytes:
    """EXIF as ImageMagick writes it into a text of a PNG."""
    return b"\nexif\n%8d\n%s\n" % (len(exif), exif.hex().encode())


EXIF = b"Exif\0\0" + struct.pack(">2sHIHHHIII", b"MM", 42, 8, 1, 0x112, 3, 1, 6 << 16, 0)
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
ORIENTED = {
    "eXIf": chunk(b"eXIf", EXIF[6:]),
    "text": chunk(b"tEXt", b"Raw profile type exif\0" + raw_profile(EXIF)),
    "compressed text": chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile(EXIF))),
    "XMP": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP),
}


@pytest.mark.parametrize("side", [40, 200])
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("kind", ORIENTED)
def test_a_png_is_turned_as_pillow_turns_it_wherever_its_orientation_stands(
    kind: str, place: str, side: int, tmp_path: Path
) -> None:
    """A file of more than the 64 KiB of its beginning too, and its index says the same size."""
    noise = np.random.default_rng(0).integers(0, 256, (side, 2 * side, 3), dtype=np.uint8)
    encoded = encode(Image.fromarray(noise), "png")
    cut = 33 if place == "before" else len(encoded) - 12
    encoded = encoded[:cut] + ORIENTED[kind] + chunk(b"tIME", bytes(7)) + encoded[cut:]
    (path := tmp_path / "a.png").write_bytes(encoded)
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
    assert turned.size == (side, 2 * side)
    decoded = decode(encoded, WHOLE, max_pixels=None)
    assert (decoded.size, decoded.rotated) == ((2 * side, side), True)
    np.testing.assert_array_equal(decoded.pixels, np.asarray(turned))
    assert upright_size(encoded) == picture_facts(path)[:2] == (side, 2 * side)


@pytest.mark.parametrize("kind", ["jpeg", "webp", "tiff"])
def test_an_orientation_in_xmp_counts_where_there_is_no_exif(kind: str) -> None:
    options = {"tiffinfo": {700: XMP}} if kind == "tiff" else {"xmp": XMP}
    encoded = encode(halves(), kind, **options)
    assert ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).size == (20, 40)
    assert decode(encoded, WHOLE, max_pixels=None).size == (40, 20)
    assert upright_size(encoded) == (20, 40)


def s15(*values: float) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def profile(space: bytes, kind: bytes = b"mntr", pcs: bytes = b"XYZ ", **tags: bytes) -> bytes:
    """An ICC profile of version 2 with these tags."""
    white = {"wtpt": b"XYZ \0\0\0\0" + s15(0.9642, 1.0, 0.8249)}
    text = {"desc": b"desc\0\0\0\0\0\0\0\x02a" + bytes(90), "cprt": b"text\0\0\0\0a\0"}
    table, body = b"", b""
    contents = {name: content + bytes(-len(content) % 4) for name, content in {**text, **white, **tags}.items()}
    for name, content in contents.items():
        table += name.encode() + struct.pack(">II", 132 + 12 * len(contents) + len(body), len(content))
        body += content
    header = struct.pack(">II4s4s4s4s12s4s", 0, 0x02100000, b"", kind, space, pcs, bytes(12), b"acsp")
    header = header.ljust(68, b"\0")[:68] + s15(0.9642, 1.0, 0.8249)
    whole = header.ljust(128, b"\0") + struct.pack(">I", len(contents)) + table + body
    return struct.pack(">I", len(whole)) + whole[4:]


def curve(gamma: float) -> bytes:
    return b"curv\0\0\0\0\0\0\0\x01" + struct.pack(">H", round(gamma * 256))


def coloured(red: tuple[float, ...], green: tuple[float, ...], blue: tuple[float, ...], gamma: float) -> bytes:
    primaries = {"rXYZ": red, "gXYZ": green, "bXYZ": blue}
    tags = {name: b"XYZ \0\0\0\0" + s15(*values) for name, values in primaries.items()}
    return profile(b"RGB ", **tags, **dict.fromkeys(("rTRC", "gTRC", "bTRC"), curve(gamma)))


def of_ink() -> bytes:
    """CMYK of a table with two points an ink: white is paper, anything else black."""
    steps = bytes(range(256))
    lab = bytes([255, 128, 128]) + bytes([0, 128, 128]) * 15
    matrix = s15(1, 0, 0, 0, 1, 0, 0, 0, 1)
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + matrix + steps * 4 + lab + steps * 3
    return profile(b"CMYK", b"prtr", b"Lab ", A2B0=table, B2A0=table)


ADOBE_RGB = coloured((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457), 2.2)
SRGB_COLOURS = (0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.7141)
LINEAR, GRAY = coloured(*SRGB_COLOURS, 1.0), profile(b"GRAY", kTRC=curve(1.0))
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
GREEN = Image.new("RGB", (40, 20), (112, 199, 75))  # (0, 200, 60) as Adobe RGB has it
MANY = Image.new("RGB", (600, 600), (112, 199, 75))


@pytest.mark.parametrize(
    ("image", "kind", "icc", "rgb"),
    [
        (GREEN, "png", ADOBE_RGB, (0, 200, 60)),
        (GREEN, "jpeg", ADOBE_RGB, (0, 200, 60)),
        (MANY, "jpeg", ADOBE_RGB, (0, 200, 60)),
        (GREEN, "webp", ADOBE_RGB, (0, 200, 60)),
        (GREEN, "tiff", ADOBE_RGB, (0, 200, 60)),
        (GREEN.quantize(4), "png", ADOBE_RGB, (0, 200, 60)),
        (Image.new("RGBA", (8, 8), (112, 199, 75, 255)), "png", ADOBE_RGB, (0, 200, 60)),
        (Image.new("RGBA", (8, 8), (112, 199, 75, 0)), "png", ADOBE_RGB, (255, 255, 255)),
        (Image.new("RGB", (8, 8), (55, 55, 55)), "png", LINEAR, (128, 128, 128)),
        (Image.new("L", (8, 8), 55), "png", GRAY, (128, 128, 128)),
        (Image.new("L", (8, 8), 55), "jpeg", GRAY, (128, 128, 128)),
        (Image.new("LA", (8, 8), (55, 255)), "png", GRAY, (128, 128, 128)),
        (Image.fromarray(np.full((8, 8), 55 * 257, dtype=np.uint16)), "png", GRAY, (128, 128, 128)),
        (Image.new("L", (8, 8), 55), "png", LINEAR, (128, 128, 128)),
        (Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "jpeg", of_ink(), (255, 255, 255)),
        (Image.new("CMYK", (8, 8), (0, 255, 0, 0)), "jpeg", of_ink(), (0, 0, 0)),
    ],
)
def test_a_colour_profile_is_converted_to_srgb(image: Image.Image, kind: str, icc: bytes, rgb: tuple[int, ...]) -> None:
    decoded = decode(
        encode(image, kind, icc_profile=icc, **({"quality": 95} if kind != "png" else {})), (8, 8), max_pixels=None
    )
    assert decoded.converted
    assert np.abs(decoded.pixels.astype(int) - np.array(rgb)).max() <= (
        4 if kind in ("png", "tiff") else 12
    )  # near black


@pytest.mark.parametrize("kind", ["png", "jpeg"])
@pytest.mark.parametrize("icc", [SRGB, coloured(*SRGB_COLOURS, 1.0)[:200], b"no profile", GRAY, of_ink()])
def test_srgb_and_profiles_that_do_not_fit_leave_every_pixel(icc: bytes, kind: str) -> None:
    decoded = decode(encode(photo(64, 48), kind, icc_profile=icc), WHOLE, max_pixels=None)
    assert not decoded.converted
    np.testing.assert_array_equal(decoded.pixels, pixels_of(encode(photo(64, 48), kind)))


def test_the_values_of_a_mask_are_no_colours() -> None:
    mask = encode(Image.new("L", (8, 8), 55), "png", icc_profile=GRAY)
    assert decode(mask, WHOLE, max_pixels=None, is_mask=True).pixels.max() == 55


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
        (Image.new("L", (8, 8), 77), "jpeg", (77, 77, 77)),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "jpeg", (254, 0, 0)),
        (sixteen_bit(), "png", (128, 128, 128)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else None,
)
def test_every_mode_becomes_rgb(image: Image.Image, kind: str, rgb: tuple[int, int, int]) -> None:
    pixels = pixels_of(encode(image, kind)).astype(int)
    assert np.abs(pixels - np.array(rgb)).max() <= 3


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_a_file_cut_short_is_unreadable(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    encoded = encode(Image.fromarray(noise), kind)
    with pytest.raises(UnreadableSampleError, match=r"Error: .+"):
        pixels_of(encoded[: len(encoded) // 2])


@pytest.mark.parametrize("encoded", [b"no picture at all", b"\x89PNG\r\n\x1a\n" + b"\0" * 50])
def test_what_is_no_picture_is_unreadable(encoded: bytes) -> None:
    with pytest.raises(UnreadableSampleError, match="not a picture of a known format|SyntaxError"):
        pixels_of(encoded)
    with pytest.raises(UnreadableSampleError, match="not a picture of a known format|SyntaxError"):
        upright_size(encoded)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
def test_a_decompression_bomb_is_refused_by_its_header(kind: str) -> None:
    encoded, before = encode(halves(), kind), Image.MAX_IMAGE_PIXELS
    with pytest.raises(UnreadableSampleError, match="more pixels than data.max_pixels=799 allows"):
        decode(encoded, WHOLE, max_pixels=799)
    assert before == Image.MAX_IMAGE_PIXELS
    assert decode(encoded, WHOLE, max_pixels=800).size == (20, 40)
    assert upright_size(encoded) == (40, 20)


def test_a_bomb_is_never_unpacked() -> None:
    """30000 x 30000 px in a few hundred bytes; a header is all that is read of it."""
    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(header)) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    idat = zlib.compress(b"\0" * 100_000)
    data = struct.pack(">I", len(idat)) + b"IDAT" + idat + struct.pack(">I", zlib.crc32(b"IDAT" + idat))
    bomb = b"\x89PNG\r\n\x1a\n" + chunk + data
    assert upright_size(bomb) == (30000, 30000)
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableSampleError, match="more pixels than data.max_pixels=134217728"):
            decode(bomb, (64, 64), max_pixels=2**27)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", b"GRIB" + b"\0" * 60])
def test_formats_that_start_other_programs_are_not_pictures(content: bytes) -> None:
    """Whatever their extension: PIL would hand the first to Ghostscript."""
    with pytest.raises(UnreadableSampleError, match="not a picture of a known format"):
        pixels_of(content)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(("target", "shorter"), [(50, 125), (100, 125), (101, 250), (200, 250), (201, 1000)])
def test_a_large_jpeg_is_decoded_at_a_fraction_that_leaves_room(orientation: int, target: int, shorter: int) -> None:
    """1000 px of the shorter side at 1.25 times the target: an eighth, a quarter, or whole."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode(encode(halves(1600, 1000), "jpeg", exif=exif), (target, target), max_pixels=None)
    turned = orientation == 6
    assert decoded.size == ((1600, 1000) if turned else (1000, 1600))
    assert min(decoded.pixels.shape[:2]) == shorter
    red, blue = decoded.pixels[0, 0], decoded.pixels[-1, -1]
    assert np.abs(red.astype(int) - (200, 0, 0)).max() <= 3
    assert np.abs(blue.astype(int) - (0, 0, 200)).max() <= 3


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    decoding.fast_jpeg_decoder.cache_clear()
    yield
    decoding.fast_jpeg_decoder.cache_clear()


@pytest.mark.parametrize("module", ["torchvision", "torchvision.io"])
def test_without_torchvision_pillow_decodes_and_one_warning_says_so(module, monkeypatch, caplog):
    encoded = encode(photo(64, 48), "jpeg")
    fast = pixels_of(encoded)
    decoding.fast_jpeg_decoder.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with caplog.at_level(logging.WARNING):
        slow = [pixels_of(encoded) for _ in range(3)]
    assert decoding.fast_jpeg_decoder() is None
    assert caplog.text.count("torchvision cannot decode JPEG here (") == 1
    assert np.abs(slow[0].astype(int) - fast).max() <= 2


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_both_decoders_give_the_same(mode: str, subsampling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(photo(65, 47).convert(mode), "jpeg", quality=88, subsampling=subsampling, progressive=True)
    fast = pixels_of(encoded)
    monkeypatch.setattr("cascade_train.data.decoding.decode.fast_jpeg_decoder", lambda: None)
    assert np.abs(pixels_of(encoded).astype(int) - fast).max() <= 2


def test_both_decoders_refuse_the_same_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that change, vanish, or end: a file that one refuses the other refuses too, and pixels agree."""
    whole = encode(photo(64, 48), "jpeg", quality=90)
    draws = np.random.default_rng(0)
    damaged = []
    for _ in range(60):
        file = bytearray(whole)
        for place in draws.integers(2, len(file), 3):
            file[place] = draws.integers(256)
        damaged.append(bytes(file[: draws.integers(len(file) // 2, 2 * len(file))]))

    def outcomes() -> list[np.ndarray | None]:
        found: list[np.ndarray | None] = []
        for file in damaged:
            try:
                found.append(pixels_of(file).astype(int))
            except UnreadableSampleError:
                found.append(None)
        return found

    with_fast = outcomes()
    monkeypatch.setattr("cascade_train.data.decoding.decode.fast_jpeg_decoder", lambda: None)
    without = outcomes()
    assert [each is None for each in with_fast] == [each is None for each in without]
    assert 10 < sum(each is None for each in with_fast) < 55
    assert all(np.abs(one - other).max() <= 2 for one, other in zip(with_fast, without, strict=True) if one is not None)
