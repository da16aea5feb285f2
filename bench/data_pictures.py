"""Pictures for the benchmark of the data path: what cameras give, made from a seed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from cascade_train.data.tar.members import write_tar

_OCTAVES = (8, 24, 80, 250)  # cells across the picture, of ever finer and fainter structure


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Return structure of many sizes, as natural pictures have it, with a sensor's grain."""
    draws = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), 127.5, dtype=np.float32)
    for cells in _OCTAVES:
        rows = max(2, cells * height // width)
        for channel in range(3):
            coarse = Image.fromarray(draws.normal(size=(rows, cells)).astype(np.float32))
            fine = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
            pixels[:, :, channel] += 60 / cells**0.35 * fine
    pixels += draws.normal(0, 4, (height, width, 1)).astype(np.float32)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image, quality: int) -> bytes:
    """Encode as cameras and the web do: 4:2:0, baseline."""
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=quality)
    return file.getvalue()


def write_set(folder: Path, images: Sequence[bytes], count: int) -> Path:
    """Write a tar of `count` samples that go through `images` again and again."""
    samples = (
        {"__key__": f"{row:05d}", "jpg": images[row % len(images)], "txt": f"picture {row}"} for row in range(count)
    )
    return write_tar(folder / "set.tar", samples)
