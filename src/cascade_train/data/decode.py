"""Encoded picture -> uint8 RGB crop of one size, and the size of a picture as it is seen.

PIL and numpy only; the step to float happens on the training device.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, UnidentifiedImageError

from cascade_train.data.sample import UnreadableSampleError

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def upright_size(encoded: bytes) -> tuple[int, int]:
    """Read (width, height) in pixels from the header, sides swapped where the EXIF orientation says so.

    Args:
        encoded: the file, or enough of its beginning to hold the header.

    Raises:
        UnreadableSampleError: there is no readable header.
    """
    with _damage_reported():
        image = Image.open(io.BytesIO(encoded))
        width, height = image.size
        return (height, width) if _orientation(image) >= 5 else (width, height)


def decode(picture: bytes | np.ndarray, height: int, width: int, *, offset: tuple[float, float]) -> np.ndarray:
    """Decode, turn upright, resize with antialiasing so that the picture covers the target, and crop.

    Args:
        picture: an encoded file, or (H, W, 3) uint8 RGB.
        height: of the result in pixels.
        width: of the result in pixels.
        offset: where the crop lies, across and down, in [0, 1]; (0.5, 0.5) is the centre.

    Returns:
        (3, height, width) uint8 RGB.

    Raises:
        UnreadableSampleError: the file is damaged, or larger than PIL's limit for a picture.
    """
    with _damage_reported():
        image = Image.fromarray(picture) if isinstance(picture, np.ndarray) else _open_upright(picture)
        box = _crop_box(image.size, (width, height), offset)
        image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to 8-bit RGB: transparency on white, 16-bit scaled rather than clipped."""
    if image.mode.startswith("I"):
        samples = np.asarray(image).astype(np.int64)
        if image.mode != "I" or samples.max(initial=0) > 255:
            samples = (samples * 255 + 32767) // 65535
        image = Image.fromarray(samples.clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _open_upright(encoded: bytes) -> Image.Image:
    stored = Image.open(io.BytesIO(encoded))
    orientation = _orientation(stored)
    image = to_rgb(stored)
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 where there is none. Never decodes pixels, so that a header is enough."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    return orientation if orientation in _UPRIGHT else 1


def _crop_box(
    size: tuple[int, int], target: tuple[int, int], offset: tuple[float, float]
) -> tuple[float, float, float, float]:
    """Return the largest box of the target's shape inside the picture, at `offset` of the room that is left."""
    scale = min(size[0] / target[0], size[1] / target[1])
    box_width, box_height = min(target[0] * scale, size[0]), min(target[1] * scale, size[1])
    left, top = (size[0] - box_width) * offset[0], (size[1] - box_height) * offset[1]
    return (left, top, min(left + box_width, size[0]), min(top + box_height, size[1]))


@contextmanager
def _damage_reported() -> Iterator[None]:
    """Turn whatever a damaged file makes PIL raise into `UnreadableSampleError`.

    PIL answers damage with OSError, SyntaxError, ValueError, struct.error, IndexError and others, so every
    Exception counts; memory exhaustion does not.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except MemoryError:
        raise
    except UnidentifiedImageError as error:  # its own text is the address of a buffer
        raise UnreadableSampleError("not a picture of a known format, or one without a beginning") from error
    except Exception as error:
        raise UnreadableSampleError(f"{type(error).__name__}: {error}") from error
