"""Pictures and control maps of a user's, read for the verb that paints under them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from cascade_train.errors import ConfigError
from cascade_train.tasks.base import Guide

MAP_MODES = {"1": "L", "L": "L", "LA": "L", "RGBA": "RGBA"}
"""Mode of a stored map -> that of its channels; all others are read as three colours."""


@dataclass(frozen=True, kw_only=True)
class GuideFiles:
    """Files that samples follow.

    Attributes:
        paths: one for all prompts, or one for each.
        is_map: whether they are finished control maps.
        strength: what the control is multiplied by.
        side: in pixels, to which they are cropped and resized.
    """

    paths: Sequence[str]
    is_map: bool
    strength: float
    side: int

    def guide(self, prompts: Sequence[int], numbers: Sequence[int]) -> Guide:
        """Return the guide of some images.

        Args:
            prompts: index of each image's prompt.
            numbers: of the images, on which random choices about their maps depend.

        Raises:
            ConfigError: a file that is no picture, or maps of different kinds.
        """
        arrays = [self._read(self.paths[prompt % len(self.paths)]) for prompt in prompts]
        if len({array.shape for array in arrays}) > 1:
            raise ConfigError(f"control={','.join(self.paths)}: maps of one kind are needed: all grey, or all coloured")
        return Guide(
            image_BCHW=torch.from_numpy(np.stack(arrays)),
            is_map=self.is_map,
            strength=self.strength,
            numbers=tuple(numbers),
        )

    def _read(self, path: str) -> np.ndarray:
        """Return a picture as (C, side, side) uint8, the middle of it where it is not square."""
        key = "control" if self.is_map else "image"
        try:
            with Image.open(Path(path).expanduser()) as stored:
                upright = ImageOps.exif_transpose(stored)
                picture = upright.convert(MAP_MODES.get(upright.mode, "RGB") if self.is_map else "RGB")
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ConfigError(
                f"{key}={path}: no picture that can be read ({type(error).__name__}); name one"
            ) from error
        fitted = ImageOps.fit(picture, (self.side, self.side), Image.Resampling.BILINEAR)
        return np.ascontiguousarray(np.atleast_3d(np.asarray(fitted)).transpose(2, 0, 1))
