"""A user's images and control maps, read for `cascade-train generate`."""

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
    """Files that samples follow or start from; of each kind none, one for all prompts, or one for each.

    Attributes:
        key: how `paths` were named: "image", or "control" for finished control maps.
        paths: what the samples follow.
        strength: what the control is multiplied by.
        starts: what they start from.
        start_strength: time to which those are noised.
        variations: whose embeddings are conditions.
        size: height and width in pixels, to which all but `variations` are cropped and resized.
        side: of the squares to which `variations` are.
    """

    key: str
    paths: Sequence[str]
    strength: float
    starts: Sequence[str] = ()
    start_strength: float = 1.0
    variations: Sequence[str] = ()
    size: tuple[int, int]
    side: int

    def guide(self, prompts: Sequence[int], numbers: Sequence[int]) -> Guide | None:
        """Return the guide of some images; None where there are no files.

        Args:
            prompts: index of each image's prompt.
            numbers: of the images, on which random choices about their maps depend.

        Raises:
            ConfigError: a file that is no picture, or maps of different kinds.
        """
        if not (self.paths or self.starts or self.variations):
            return None
        return Guide(
            image_BCHW=self._read_all(self.key, self.paths, prompts, self.size),
            is_map=self.key == "control",
            strength=self.strength,
            numbers=tuple(numbers),
            start_BCHW=self._read_all("start_image", self.starts, prompts, self.size),
            start_strength=self.start_strength,
            variation_BCHW=self._read_all("variation", self.variations, prompts, (self.side, self.side)),
        )

    def _read_all(
        self, key: str, paths: Sequence[str], prompts: Sequence[int], size: tuple[int, int]
    ) -> torch.Tensor | None:
        if not paths:
            return None
        arrays = [read_picture(key, paths[prompt % len(paths)], size) for prompt in prompts]
        if len({array.shape for array in arrays}) > 1:
            raise ConfigError(f"{key}={','.join(paths)}: maps of one kind are needed: all grey, or all coloured")
        return torch.from_numpy(np.stack(arrays))


def read_picture(key: str, path: str, size: tuple[int, int]) -> np.ndarray:
    """Return a picture, or for the key "control" a map, as (C, *size) uint8, the middle of it in another shape.

    Raises:
        ConfigError: the file is no picture.
    """
    try:
        with Image.open(Path(path).expanduser()) as stored:
            upright = ImageOps.exif_transpose(stored)
            picture = upright.convert(MAP_MODES.get(upright.mode, "RGB") if key == "control" else "RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{key}={path}: no picture that can be read ({type(error).__name__}); name one") from error
    fitted = ImageOps.fit(picture, size[::-1], Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.atleast_3d(np.asarray(fitted)).transpose(2, 0, 1))
