"""Black and white, divided at a brightness."""

from __future__ import annotations

import numpy as np
import torch

from cascade_train.filters.base import ImageFilter


class ThresholdFilter(ImageFilter):
    """One channel, 1 where the picture is brighter than `level`, of 255."""

    channels = 1

    def __init__(self, *, level: int) -> None:
        if not 0 <= level <= 255:
            raise ValueError(f"level={level}: is a brightness, give 0 to 255")
        self.level = level

    def apply(self, image: np.ndarray, generator: torch.Generator) -> np.ndarray:
        return np.where(image.mean(axis=0, keepdims=True) > self.level, np.uint8(255), np.uint8(0))
