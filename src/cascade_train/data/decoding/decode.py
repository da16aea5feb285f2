"""Encoded picture -> upright uint8 RGB pixels, and the size of a picture from its header. Cropping: framing.py."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from cascade_train.data.sample import UnreadableSampleError

FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are decoded, whatever a file's extension says. PIL knows others, one of which starts an interpreter."""

SCALED_ROOM = 1.25
"""A JPEG is decoded at a fraction of its size only where this times the target is left."""

_FRACTIONS = (8, 4)  # half the size saves a sixth of the time and costs 8 dB: not worth it (bench/results/data.md)
_PIL_SETTINGS = threading.RLock()  # its limit and Python's warning filters are global to the process
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Decoded:
    """A picture's pixels, perhaps a view, and possibly decoded at a fraction of the picture's size."""

    pixels: np.ndarray  # (h, w, 3) uint8 RGB, upright
    size: tuple[int, int]  # height and width of the picture in pixels, upright
    rotated: bool = False  # whether the EXIF orientation turned or mirrored it


def upright_size(encoded: bytes) -> tuple[int, int]:
    """Read (width, height) in pixels from a file's beginning, swapped where EXIF says so. Thread-safe.

    An UnreadableSampleError where there is no readable header.
    """
    with _damage_reported(max_pixels=None):
        image = _opened(encoded)
        width, height = image.size
        return (height, width) if _orientation(image) >= 5 else (width, height)


def decode(
    picture: bytes | np.ndarray, target: tuple[int, int], *, max_pixels: int | None, background: str = "white"
) -> Decoded:
    """Decode and turn upright; a large JPEG at a fraction of its size that leaves room for the target (height, width).

    A picture is an encoded file, or (H, W, 3) uint8 RGB; transparency shows the background. A file that is damaged, of
    an unknown format, or of more than `max_pixels` is an UnreadableSampleError.
    """
    if isinstance(picture, np.ndarray):
        return Decoded(pixels=picture, size=picture.shape[:2])
    with _damage_reported(max_pixels):
        stored = _opened(picture)
        orientation = _orientation(stored)
        width, height = stored.size
        size = (height, width) if orientation < 5 else (width, height)
        room = min(side / wanted for side, wanted in zip(size, target, strict=True))
        fits = [fraction for fraction in _FRACTIONS if room / fraction >= SCALED_ROOM]
        fraction = fits[0] if fits and stored.format in ("JPEG", "MPO") else 1
        if fraction > 1:
            stored.draft(None, (width // fraction, height // fraction))
        pixels = _pixels(stored, picture, background, whole=fraction == 1)
        return Decoded(pixels=_upright(pixels, orientation), size=size, rotated=orientation != 1)


def to_rgb(image: Image.Image, background: str = "white") -> Image.Image:
    """Convert to 8-bit RGB: transparency on the background, 16-bit scaled; a ValueError for floats of unknown range."""
    if image.mode == "F":
        raise ValueError("32-bit float samples have no known range; store 8 or 16 bits a channel")
    if image.mode.startswith("I"):
        samples = np.asarray(image).astype(np.int64)
        if image.mode != "I" or samples.max(initial=0) > 255:
            samples = (samples * 255 + 32767) // 65535
        image = Image.fromarray(samples.clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, background), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # which copies, also from RGB


@functools.cache
def fast_jpeg_decoder() -> Callable[[bytes], np.ndarray] | None:
    """Return torchvision's decoder of gray and colour JPEG to (H, W, 3) uint8 RGB; None, with one warning, without it.

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
    return Image.open(io.BytesIO(encoded), formats=_known_formats())


@functools.cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # AVIF is new in Pillow 11.3


def _pixels(stored: Image.Image, encoded: bytes, background: str, *, whole: bool) -> np.ndarray:
    """Decode to (H, W, 3) uint8 RGB as stored, by the fast decoder where it gives what PIL would."""
    fast = fast_jpeg_decoder()
    if fast is not None and whole and stored.format in ("JPEG", "MPO") and stored.mode in ("RGB", "L"):
        with contextlib.suppress(RuntimeError):  # PIL decides whether the file is damaged or only unusual
            return fast(encoded)
    return np.asarray(to_rgb(stored, background))


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    down = -1 if orientation in (3, 4, 7, 8) else 1
    across = -1 if orientation in (2, 3, 6, 7) else 1
    return pixels[::down, ::across]


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 = upright, or none. Never decodes pixels, so that a header is enough."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1  # Pillow itself turns a TIFF
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    return orientation if orientation in range(1, 9) else 1


@contextmanager
def _damage_reported(max_pixels: int | None) -> Iterator[None]:
    """Turn whatever PIL raises for a damaged or too large file into `UnreadableSampleError`.

    For damage that is OSError, SyntaxError, ValueError, struct.error, IndexError and others, so every Exception
    counts; running out of memory does not.
    """
    with _PIL_SETTINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
        try:
            yield
        except MemoryError:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise UnreadableSampleError(f"more pixels than data.max_pixels={max_pixels} allows") from error
        except UnidentifiedImageError as error:  # its own text is the address of a buffer
            raise UnreadableSampleError("not a picture of a known format, or one without a beginning") from error
        except Exception as error:
            raise UnreadableSampleError(f"{type(error).__name__}: {error}") from error
        finally:
            Image.MAX_IMAGE_PIXELS = limit
