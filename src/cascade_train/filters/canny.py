"""Edges by Canny's detector, as for the original's `canny` ControlNet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cascade_train.filters.base import ImageFilter, resize_map
from cascade_train.filters.parts.requirements import opencv, require
from cascade_train.options import Positive, check_fields


@dataclass(kw_only=True, eq=False)
class CannyFilter(ImageFilter):
    """One channel, 1 on edges, between 0 and 1 where they were resized from a small copy. Needs OpenCV.

    Stable Cascade, modules/controlnet.py, `CannyFilter`. The small copy is square whatever the picture's sides are.
    """

    channels = 1
    at_picture_size = True

    resize: Positive[int | None]
    low: float
    high: float

    def __post_init__(self) -> None:
        require("cv2")
        check_fields(self, "task.filter.")
        if not 0 <= self.low <= self.high:
            raise ValueError(f"low={self.low}, high={self.high}: edges need 0 <= low <= high; raise high, or lower low")

    def apply(self, image: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """Edges of one picture, (1, h, w) uint8, 0 or 255, at the size of the copy."""
        return self.edges(torch.from_numpy(image).float())

    def edges(self, image_CHW: Tensor) -> np.ndarray:
        """Edges (1, h, w) uint8, 0 or 255, of a picture (3, H, W) float in [0, 255]."""
        cv2 = opencv()
        if self.resize is not None:
            image_CHW = resize_map(image_CHW[None], (self.resize, self.resize))[0]
        pixels = np.ascontiguousarray(image_CHW.byte().numpy().transpose(1, 2, 0))
        return cv2.Canny(pixels, self.low, self.high)[None]
