from __future__ import annotations

import numpy as np
import pytest

from cascade_train.data.decoding.framing import Framing
from cascade_train.data.decoding.saliency import salient_offset, spectral_residual
from tests.unit.data.decoding.test_framing import draw


def scene(left: int, top: int, width: int = 400, height: int = 200, side: int = 24) -> np.ndarray:
    """One bright square on a background of soft waves."""
    y, x = np.mgrid[:height, :width]
    pixels = 100 + 10 * np.sin(x / 9) + 10 * np.sin(y / 7)
    pixels[top : top + side, left : left + side] = 250
    return np.repeat(pixels[:, :, None], 3, axis=2).astype(np.uint8)


@pytest.mark.parametrize("left", [0, 40, 180, 330, 376])
@pytest.mark.parametrize("turned", [False, True])
def test_what_stands_out_is_in_the_crop(left: int, turned: bool) -> None:
    pixels = scene(left, 90)
    pixels = np.ascontiguousarray(pixels.transpose(1, 0, 2)) if turned else pixels
    framed = Framing(crop="saliency", flip_prob=0.0, max_pixels=None)(pixels, None, 64, 64, draw)
    start = framed.box.top if turned else framed.box.left
    assert start <= left
    assert left + 24 <= start + 200


def test_the_residual_is_highest_at_the_object() -> None:
    saliency = spectral_residual(scene(20, 20, 64, 64, 6)[:, :, 0].astype(float))
    top, left = np.unravel_index(saliency.argmax(), saliency.shape)
    assert saliency.shape == (64, 64)
    assert saliency.min() >= 0
    assert 16 <= top <= 30
    assert 16 <= left <= 30


@pytest.mark.parametrize("value", [0, 255])
def test_a_plain_picture_is_cut_in_the_middle(value: int) -> None:
    pixels = np.full((100, 300, 3), value, dtype=np.uint8)
    assert salient_offset(pixels, 100, 100) == (0.5, 0.5)


def test_the_place_is_the_same_every_time() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (120, 500, 3), dtype=np.uint8)
    assert len({salient_offset(pixels.copy(), 120, 120) for _ in range(3)}) == 1
