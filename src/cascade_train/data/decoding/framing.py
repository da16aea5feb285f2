"""From a sample's picture to the pixels that enter a batch: which part, at which size, mirrored or not.

All in uint8: floats first appear on the training device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from cascade_train.data.decoding.decode import decode
from cascade_train.data.sample import UnreadableSampleError

Draw = Callable[[str], torch.Generator]
"""Returns the sample's generator for one purpose."""

_SALIENCY_PX = 64  # the paper's size, at which objects stand out and texture does not
_TIE = 0.02  # share of the best score by which a place must be worse to lose against one nearer to the middle


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a picture in whole pixels."""

    top: int
    left: int
    height: int
    width: int

    def scaled(self, size: tuple[int, int], to: tuple[int, int]) -> Box:
        """About the same part of the picture at another (height, width)."""
        top, height = _scaled_span(self.top, self.height, size[0], to[0])
        left, width = _scaled_span(self.left, self.width, size[1], to[1])
        return Box(top=top, left=left, height=height, width=width)


@dataclass(frozen=True, eq=False, kw_only=True)
class Framed:
    """A sample's picture as it enters a batch."""

    image: np.ndarray  # (3, H, W) uint8 RGB, perhaps a view
    mask: np.ndarray | None  # (1, H, W) uint8, 255 where the loss counts; None where the sample has no mask
    size: tuple[int, int]  # height and width of the whole picture in pixels, upright
    box: Box  # the part that was taken, in pixels of the whole picture
    flipped: bool  # whether that part was mirrored left to right


@dataclass(frozen=True, kw_only=True)
class Framing:
    """How pictures are cropped. The attributes are those of `Source`."""

    crop: Literal["center", "random", "saliency"]
    flip_prob: float
    max_pixels: int | None

    def __call__(
        self, image: bytes | np.ndarray, mask: bytes | np.ndarray | None, height: int, width: int, draw: Draw
    ) -> Framed:
        """Decode a picture and its mask, take the largest part of the target's shape in pixels, and resize it.

        Raises as `decode`, and where the mask has another size than the picture.
        """
        decoded = decode(image, (height, width), max_pixels=self.max_pixels)
        box = self._box(decoded.pixels, decoded.size, (height, width), draw)
        flip = self.flip_prob > 0.0 and float(torch.rand(1, generator=draw("flip"))) < self.flip_prob
        part = box.scaled(decoded.size, decoded.pixels.shape[:2])
        return Framed(
            image=cut(decoded.pixels, part, height, width, flip=flip),
            mask=None if mask is None else self._mask(mask, decoded.size, box, (height, width), flip=flip),
            size=decoded.size,
            box=box,
            flipped=flip,
        )

    def _box(self, pixels: np.ndarray, size: tuple[int, int], target: tuple[int, int], draw: Draw) -> Box:
        box = largest_box(size, target, (0.5, 0.5))
        if self.crop == "center" or (box.height, box.width) == size:
            return box
        if self.crop == "random":
            across, down = torch.rand(2, generator=draw("crop")).tolist()
        else:
            part = box.scaled(size, pixels.shape[:2])
            across, down = salient_offset(pixels, part.height, part.width)
        return largest_box(size, target, (across, down))

    def _mask(
        self, mask: bytes | np.ndarray, size: tuple[int, int], box: Box, target: tuple[int, int], *, flip: bool
    ) -> np.ndarray:
        gray = gray_mask(mask, size, target, max_pixels=self.max_pixels)
        return cut(gray[:, :, None], box.scaled(size, gray.shape[:2]), *target, flip=flip)


def gray_mask(
    mask: bytes | np.ndarray, size: tuple[int, int], target: tuple[int, int], *, max_pixels: int | None
) -> np.ndarray:
    """Decode the mask of a picture of this (height, width) as `decode`, to (h, w) uint8; what is transparent is 0.

    Raises as `decode`, and where the mask has another size than the picture.
    """
    if isinstance(mask, np.ndarray):
        gray, mask_size = mask, mask.shape[:2]
    else:
        decoded = decode(mask, target, max_pixels=max_pixels, is_mask=True)
        gray, mask_size = np.asarray(_gray(decoded.pixels)), decoded.size
    if mask_size != size:
        raise UnreadableSampleError(
            f"the mask is {mask_size[1]} x {mask_size[0]} px, the picture {size[1]} x {size[0]}: they must be equal"
        )
    return gray


def largest_box(size: tuple[int, int], target: tuple[int, int], offset: tuple[float, float]) -> Box:
    """Largest part of the target's shape, rounded to whole pixels; sizes are height and width.

    `offset` is where it lies, across and down, in [0, 1] of the room that is left; (0.5, 0.5) is the middle.
    """
    scale = min(size[0] / target[0], size[1] / target[1])
    height, width = (min(side, max(1, round(wanted * scale))) for side, wanted in zip(size, target, strict=True))
    left, top = round((size[1] - width) * offset[0]), round((size[0] - height) * offset[1])
    return Box(top=top, left=left, height=height, width=width)


def cut(pixels: np.ndarray, box: Box, height: int, width: int, *, flip: bool) -> np.ndarray:
    """Crop (H, W, C) uint8 pixels, mirror them left to right if `flip`, and resize them with antialiasing.

    Channels stay innermost, also in the view (C, height, width) that is returned: torch's uint8 kernel is then several
    times faster. It rounds after each of its two passes, which keeps 57 dB to the same in float.
    """
    part = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    part = part[:, ::-1] if flip else part
    if not (part.flags.c_contiguous and part.flags.writeable and min(part.strides) > 0):
        part = part.copy()  # torch needs dense, writable memory without negative strides
    if (box.height, box.width) == (height, width):
        return part.transpose(2, 0, 1)
    channels_last = torch.from_numpy(part)[None].permute(0, 3, 1, 2)  # in this order: else torch takes it for planes
    resized = F.interpolate(channels_last, (height, width), mode="bilinear", antialias=True)
    return resized[0].numpy()


def salient_offset(pixels: np.ndarray, height: int, width: int) -> tuple[float, float]:
    """`offset` at which a window of (height, width) pixels is most salient in (H, W, 3) uint8 RGB.

    Of places that are about as good, it is the one nearest to the middle.
    """
    stride = max(1, min(pixels.shape[:2]) // (4 * _SALIENCY_PX))  # every n-th pixel is enough to begin with
    thumbnail = _gray(pixels[::stride, ::stride]).resize((_SALIENCY_PX, _SALIENCY_PX), Image.Resampling.BILINEAR)
    gray = np.asarray(thumbnail, dtype=np.float64)
    if gray.min() == gray.max():
        return 0.5, 0.5
    saliency = spectral_residual(gray)
    across = _best_place(saliency.sum(axis=0), width / pixels.shape[1])
    down = _best_place(saliency.sum(axis=1), height / pixels.shape[0])
    return across, down


def spectral_residual(gray: np.ndarray) -> np.ndarray:
    """How much each place of a (H, W) picture stands out, (H, W) float64 >= 0.

    Equations 1 to 5 of Hou and Zhang, "Saliency detection: a spectral residual approach" (CVPR 2007).
    """
    spectrum = np.fft.fft2(gray)
    log_amplitude = np.log(np.abs(spectrum) + 1e-8)
    residual = log_amplitude - _blurred(log_amplitude, 1)
    map_HW = np.abs(np.fft.ifft2(np.exp(residual + 1j * np.angle(spectrum)))) ** 2
    return _blurred(map_HW, 3)


def _blurred(values: np.ndarray, reach: int) -> np.ndarray:
    """Mean over a square of side 2 * reach + 1, twice, wrapping around the edges."""
    for axis in (0, 1, 0, 1):
        values = np.mean([np.roll(values, shift, axis) for shift in range(-reach, reach + 1)], axis=0)
    return values


def _best_place(profile: np.ndarray, share: float) -> float:
    """Where, in [0, 1], a window of a share of the profile's length holds most of it."""
    window = min(len(profile), max(1, round(share * len(profile))))
    sums = np.convolve(profile, np.ones(window), mode="valid")
    if len(sums) == 1:
        return 0.5
    good = np.flatnonzero(sums >= sums.max() * (1 - _TIE))
    return float(good[np.abs(good - (len(sums) - 1) / 2).argmin()] / (len(sums) - 1))


def _gray(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(pixels)).convert("L")


def _scaled_span(start: int, length: int, side: int, to: int) -> tuple[int, int]:
    if side == to:
        return start, length
    begin = min(to - 1, round(start * to / side))
    return begin, max(1, min(to - begin, round(length * to / side)))
