"""The fast decoder of JPEG files, where this environment has one.

torchvision's was the fastest of those that need no dependency of their own (`bench/results/data.md`).
"""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable

import numpy as np
from PIL import Image

JpegDecoder = Callable[[bytes], np.ndarray]
_log = logging.getLogger(__name__)


@functools.cache
def fast_jpeg_decoder() -> JpegDecoder | None:
    """Return what decodes a JPEG of gray or colour to (H, W, 3) uint8 RGB; None, with one warning, where nothing can.

    What it returns raises RuntimeError for a damaged file. It takes seconds the first time, so a process asks before
    it starts others.
    """
    try:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg  # seconds to import

        def decode(encoded: bytes) -> np.ndarray:
            file = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)  # a copy: torch writes to what it is given
            pixels: torch.Tensor = decode_jpeg(file, mode=ImageReadMode.RGB)
            return np.asarray(pixels.permute(1, 2, 0))

        decode(_one_pixel())
    except Exception as error:  # a build that does not fit torch fails in many ways: ImportError, OSError, RuntimeError
        _log.warning("torchvision cannot decode JPEG here (%s); Pillow does, at half the speed", error)
        return None
    return decode


def _one_pixel() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "JPEG")
    return file.getvalue()
