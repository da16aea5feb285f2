"""Bright and dark areas: for QR codes and other patterns that a picture should hide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cascade_train.filters.base import ImageFilter, between, check_kernels, disc, pick, resize_map
from cascade_train.filters.parts.requirements import opencv, require
from cascade_train.options import Positive, check_fields

LEVEL_SHARE = 0.33
"""Which share of the range between a picture's darkest and brightest pixel counts as dark, and as bright."""

BLUR_SIGMA = (0.1, 2.0)


@dataclass(kw_only=True, eq=False)
class BrightnessFilter(ImageFilter):
    """One channel: 1 where a picture is bright, 0 where it is dark, 0.5 between, in blobs of random size. Needs OpenCV.

    Stable Cascade, modules/controlnet.py, `QRFilter`; there the first picture of a batch sets the levels of all.
    """

    channels = 1
    at_picture_size = True

    resize: Positive[int | None]
    blobify: bool
    dilation_kernels: list[int]
    blur_kernels: list[int]

    def __post_init__(self) -> None:
        require("cv2")
        check_fields(self, "task.filter.")
        check_kernels("dilation_kernels", self.dilation_kernels)
        check_kernels("blur_kernels", self.blur_kernels)
        self.deterministic = not self.blobify

    def apply(self, image: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """0, 0.5 or 1 at each pixel of the copy, (1, h, w) float32."""
        value = self.value(torch.from_numpy(image).float() / 255)
        if self.blobify:
            kernel, blur = pick(self.dilation_kernels, generator), pick(self.blur_kernels, generator)
            value = blobs(value, kernel, blur, between(*BLUR_SIGMA, generator))
        return levels(value, value)[None]

    def value(self, image_CHW: Tensor) -> np.ndarray:
        """Value of HSV, (h, w) float32, of the copy of a picture (3, H, W) float in [0, 1]."""
        if self.resize is not None:
            image_CHW = resize_map(image_CHW[None], (self.resize, self.resize))[0]
        return image_CHW.amax(dim=0).numpy()


def blobs(value: np.ndarray, kernel: int, blur: int, sigma: float) -> np.ndarray:
    """Blur a map (h, w) float32, then close it with a disc; a width of 0 skips either."""
    cv2 = opencv()
    if blur > 0:
        value = cv2.GaussianBlur(value, (blur, blur), sigma, borderType=cv2.BORDER_REFLECT_101)
    if kernel > 0:
        value = cv2.erode(cv2.dilate(value, disc(kernel)), disc(kernel))
    return value


def levels(value: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """0, 0.5 or 1, float32, at each pixel of `value`, by the range of `reference`."""
    low, high = reference.min(), reference.max()
    margin = (high - low) * np.float32(LEVEL_SHARE)
    bright, dark = value > high - margin, value < low + margin
    return (1 + bright.astype(np.float32) - dark.astype(np.float32)) / 2
