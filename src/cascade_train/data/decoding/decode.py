"""Encoded picture -> upright uint8 sRGB pixels, and the size of a picture from its header. Cropping: framing.py."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, ImageCms, UnidentifiedImageError

from cascade_train.data.sample import UnreadableSampleError

FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are decoded, whatever a file's extension says. PIL knows others, one of which starts an interpreter."""

SCALED_ROOM = 1.25
"""A JPEG is decoded at a fraction of its size only where this times the target is left."""

_NO_PICTURES = {
    rb"....ftyp(hei|hev|mif1|msf1)": "HEIC, as phones write it; convert it to JPEG or PNG",
    rb"....ftyp": "a film",
    rb"\xff\x0a|\0\0\0\x0cJXL ": "JPEG XL; convert it to JPEG or PNG",
    rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51": "JPEG 2000; convert it to JPEG or PNG",
    rb"8BPS": "a Photoshop file; export it as JPEG or PNG",
    rb"%PDF": "a PDF; export it as JPEG or PNG",
    rb"\s*<svg|\s*<\?xml": "SVG or other XML; export it as JPEG or PNG",
    rb"\s*<(!doctype )?html": "a web page, as a failed download leaves it; download it again",
    rb"$": "an empty file",
}
"""Beginnings of files that are named as pictures and are none that are read."""

END_BYTES = 32 * 1024
"""Of the end of a PNG, in which what stands after its pixels is looked for."""

_PROBE = np.stack(np.meshgrid(*[np.arange(0, 256, 51, dtype=np.uint8)] * 3), axis=-1).reshape(1, -1, 3)
_SRGB_TOLERANCE = 3  # of 255, by which profiles that are called sRGB differ
_FRACTIONS = (8, 4)  # half the size saves a sixth of the time and costs 8 dB: not worth it (bench/results/data.md)
_PIL_SETTINGS = threading.RLock()  # its limit and Python's warning filters are global to the process
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Decoded:
    """A picture's pixels, perhaps a view, and possibly decoded at a fraction of the picture's size."""

    pixels: np.ndarray  # (h, w, 3) uint8 sRGB, upright
    size: tuple[int, int]  # height and width of the picture in pixels, upright
    rotated: bool = False  # whether an orientation tag turned or mirrored it
    converted: bool = False  # whether its colour profile is another than sRGB


def upright_size(encoded: bytes, read_end: Callable[[], bytes] | None = None) -> tuple[int, int]:
    """Read (width, height) in pixels from a file's beginning, swapped where its orientation says so. Thread-safe.

    `read_end` reads the last `END_BYTES` where the beginning is not all: a PNG may have its orientation there. An
    UnreadableSampleError where there is no readable header.
    """
    with _damage_reported(max_pixels=None):
        image = _opened(encoded)
        if image.format == "PNG":
            end = encoded[-END_BYTES:] if read_end is None else read_end()
            if late := _chunks_after_pixels(end):
                image = _opened(_before_pixels(encoded, late))
        width, height = image.size
        return (height, width) if _orientation(image) >= 5 else (width, height)


def decode(
    picture: bytes | np.ndarray, target: tuple[int, int], *, max_pixels: int | None, is_mask: bool = False
) -> Decoded:
    """Decode and turn upright; a large JPEG at a fraction of its size that leaves room for the target (height, width).

    A picture is an encoded file, or (H, W, 3) uint8 sRGB; transparency shows white, and black in a mask, whose values
    are no colours. A file that is damaged, of an unknown format, or of more than `max_pixels` is an
    UnreadableSampleError.
    """
    if isinstance(picture, np.ndarray):
        return Decoded(pixels=picture, size=picture.shape[:2])
    with _damage_reported(max_pixels):
        stored = _opened(picture)
        if stored.format not in ("JPEG", "MPO"):
            stored.load()  # an orientation may stand after the pixels
        orientation = _orientation(stored)
        width, height = stored.size
        size = (height, width) if orientation < 5 else (width, height)
        room = min(side / wanted for side, wanted in zip(size, target, strict=True))
        fits = [fraction for fraction in _FRACTIONS if room / fraction >= SCALED_ROOM]
        fraction = fits[0] if fits and stored.format in ("JPEG", "MPO") else 1
        if fraction > 1:
            stored.draft(None, (width // fraction, height // fraction))
        pixels = _pixels(stored, picture, is_mask=is_mask, whole=fraction == 1)
        converted = not is_mask and _transform_of(stored)[1] is not None
        return Decoded(pixels=_upright(pixels, orientation), size=size, rotated=orientation != 1, converted=converted)


def to_rgb(image: Image.Image, *, is_mask: bool = False) -> Image.Image:
    """Convert to 8-bit sRGB: by its colour profile, transparency on white, 16-bit scaled. See `decode` for masks.

    A ValueError for floats of unknown range.
    """
    mode, transform = ("RGB", None) if is_mask else _transform_of(image)
    if image.mode == "F":
        raise ValueError("32-bit float samples have no known range; store 8 or 16 bits a channel")
    if image.mode.startswith("I"):
        samples = np.asarray(image).astype(np.int64)
        if image.mode != "I" or samples.max(initial=0) > 255:
            samples = (samples * 255 + 32767) // 65535
        image = Image.fromarray(samples.clip(0, 255).astype(np.uint8))
    alpha = None
    if image.has_transparency_data:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
    if transform is not None:
        image = transform.apply(image if image.mode == mode else image.convert(mode))
    if alpha is None:
        return image if image.mode == "RGB" else image.convert("RGB")  # which copies, also from RGB
    image.putalpha(alpha)
    background = Image.new("RGBA", image.size, "black" if is_mask else "white")
    return Image.alpha_composite(background, image).convert("RGB")


def _transform_of(image: Image.Image) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """The mode to which an image is converted for its transform to sRGB; None without a profile of other colours."""
    profile, mode = image.info.get("icc_profile"), "L" if image.mode in ("L", "LA", "I", "I;16") else image.mode
    for kind in (mode, "RGB"):  # gray pictures have profiles of colours, too
        if profile and (transform := _transform(profile, kind)) is not None:
            return kind, transform
    return "RGB", None


@functools.lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The transform of a profile to sRGB; None where it changes nothing, is damaged, or has other channels."""
    try:
        transform = ImageCms.buildTransform(
            ImageCms.ImageCmsProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError, ValueError, KeyError):
        return None
    probe = Image.fromarray(_PROBE).convert(mode)
    changes = np.asarray(transform.apply(probe)).astype(int) - np.asarray(probe.convert("RGB"))
    return transform if mode == "CMYK" or np.abs(changes).max() > _SRGB_TOLERANCE else None


@functools.cache
def fast_jpeg_decoder() -> Callable[[bytes], np.ndarray] | None:
    """Torchvision's decoder of gray and colour JPEG to (H, W, 3) uint8 RGB; None, with one warning, without it.

    The decoder raises RuntimeError for a damaged file. The first call takes seconds: make it before workers fork. It
    was the fastest decoder without a dependency of its own (bench/results/data.md).
    """
    try:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg  # seconds to import

        def decode(encoded: bytes) -> np.ndarray:
            file = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)  # a copy: torch needs writable memory
            pixels: torch.Tensor = decode_jpeg(file, mode=ImageReadMode.RGB)
            return np.asarray(pixels.permute(1, 2, 0))

        file = io.BytesIO()
        Image.new("RGB", (1, 1)).save(file, "JPEG")
        decode(file.getvalue())
    except Exception as error:  # a build that does not fit torch fails in many ways: ImportError, OSError, RuntimeError
        _log.warning("torchvision cannot decode JPEG here (%s); Pillow does, at half the speed", error)
        return None
    return decode


def _opened(encoded: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(encoded), formats=_known_formats())
    except UnidentifiedImageError as error:  # its own text is the address of a buffer
        kind = next((name for form, name in _NO_PICTURES.items() if re.match(form, encoded[:32], re.IGNORECASE)), None)
        text = "not a picture of a known format, or one without a beginning" if kind is None else f"it is {kind}"
        raise UnreadableSampleError(text) from error


@functools.cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # AVIF is new in Pillow 11.3


def _chunks_after_pixels(end: bytes) -> bytes:
    """EXIF and texts of a PNG behind its pixels, found in its last bytes as a chain of right checksums to IEND."""
    if not any(name in end for name in (b"eXIf", b"tEXt", b"TXt")):  # many times as fast
        return b""
    for match in re.finditer(rb"eXIf|tEXt|[iz]TXt", end):
        begin = place = match.start() - 4
        while 0 <= place <= len(end) - 12:
            name, stop = end[place + 4 : place + 8], place + 12 + int.from_bytes(end[place : place + 4])
            if zlib.crc32(end[place + 4 : stop - 4]) != int.from_bytes(end[stop - 4 : stop]):
                break
            if name == b"IEND":
                return end[begin:place]
            place = stop
            begin = stop if name == b"IDAT" else begin
    return b""


def _before_pixels(encoded: bytes, chunks: bytes) -> bytes:
    """A PNG with chunks before its pixels, where PIL reads them without decoding; an animation stays as it is."""
    place = 8
    while (name := encoded[place + 4 : place + 8]) not in (b"IDAT", b"acTL", b""):
        place += 12 + int.from_bytes(encoded[place : place + 4])
    return encoded if name == b"acTL" else encoded[:place] + chunks + encoded[place:]


def _pixels(stored: Image.Image, encoded: bytes, *, is_mask: bool, whole: bool) -> np.ndarray:
    """Decode to (H, W, 3) uint8 sRGB as stored, by the fast decoder where it gives what PIL would."""
    fast = fast_jpeg_decoder()
    if fast is not None and whole and stored.format in ("JPEG", "MPO") and stored.mode in ("RGB", "L"):
        with contextlib.suppress(RuntimeError):  # PIL decides whether the file is damaged or only unusual
            pixels = fast(encoded)
            mode, transform = ("RGB", None) if is_mask else _transform_of(stored)
            return pixels if transform is None else np.asarray(transform.apply(Image.fromarray(pixels).convert(mode)))
    return np.asarray(to_rgb(stored, is_mask=is_mask))


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    down = -1 if orientation in (3, 4, 7, 8) else 1
    across = -1 if orientation in (2, 3, 6, 7) else 1
    return pixels[::down, ::across]


def _orientation(image: Image.Image) -> int:
    """The orientation, 1 to 8, as `ImageOps.exif_transpose` reads it, of EXIF, texts or XMP; 1 = upright, or none."""
    if image.format == "TIFF" and ExifTags.Base.Orientation in image.tag_v2:  # type: ignore[attr-defined]
        return 1  # Pillow itself turns it
    try:
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)  # that of PNG would decode
    except (ValueError, SyntaxError, LookupError, OSError, struct.error):  # damaged
        return 1
    return orientation if orientation in range(1, 9) else 1


@contextmanager
def _damage_reported(max_pixels: int | None) -> Iterator[None]:
    """Turn whatever PIL raises for a damaged or too large file into `UnreadableSampleError`."""
    with _PIL_SETTINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
        try:
            yield
        except (MemoryError, UnreadableSampleError):
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise UnreadableSampleError(f"more pixels than data.max_pixels={max_pixels} allows") from error
        except Exception as error:
            raise UnreadableSampleError(f"{type(error).__name__}: {error}") from error
        finally:
            Image.MAX_IMAGE_PIXELS = limit
