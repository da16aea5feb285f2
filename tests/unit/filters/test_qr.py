"""Bright, dark and what lies between."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cascade_train.filters.qr import BrightnessFilter, blobs, levels
from tests.unit.filters.filter_contract import ControlFilterContract, both_halves


def brightness(**options: object) -> BrightnessFilter:
    defaults = {"resize": 224, "blobify": True, "dilation_kernels": [3, 5, 7], "blur_kernels": [15]}
    return BrightnessFilter(**{**defaults, **options})


class TestBrightness(ControlFilterContract):
    def make(self) -> BrightnessFilter:
        return brightness()


class TestBrightnessWithoutBlobs(ControlFilterContract):
    def make(self) -> BrightnessFilter:
        return brightness(blobify=False)


def test_levels_are_thirds_of_the_range_of_each_picture_alone() -> None:
    dim = torch.tensor([10, 20, 40, 60, 70], dtype=torch.uint8).repeat(1, 3, 1, 1)
    bright_BCHW = torch.cat([dim, dim + 150])
    found_BCHW = both_halves(brightness(resize=None, blobify=False), bright_BCHW, 0, 0)
    assert found_BCHW[:, 0, 0].tolist() == [[0.0, 0.0, 0.5, 1.0, 1.0]] * 2


def test_a_flat_picture_is_neither_bright_nor_dark() -> None:
    flat = np.full((4, 5), 0.7, dtype=np.float32)
    assert (levels(flat, flat) == 0.5).all()


def test_a_closing_fills_small_dark_holes_and_keeps_bright_dots() -> None:
    value = np.ones((15, 15), dtype=np.float32)
    value[7, 7] = 0.0
    assert (blobs(value, 3, 0, 1.0) == 1.0).all()
    dot = blobs(1 - value, 3, 0, 1.0)
    assert (dot == 1 - value).all()


def test_a_blur_keeps_the_mean_and_lowers_the_peak() -> None:
    value = np.zeros((31, 31), dtype=np.float32)
    value[15, 15] = 1.0
    blurred = blobs(value, 0, 15, 2.0)
    assert blurred.sum() == pytest.approx(1.0, abs=1e-5)
    assert blurred.max() == pytest.approx(1 / (2 * np.pi * 4), rel=0.05)
