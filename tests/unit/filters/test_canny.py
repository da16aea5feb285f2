"""Edges lie where the picture changes."""

from __future__ import annotations

import torch

from cascade_train.filters.canny import CannyFilter
from tests.unit.filters.filter_contract import ControlFilterContract, both_halves, pictures


def canny(**options: object) -> CannyFilter:
    return CannyFilter(**{"resize": 224, "low": 100, "high": 200, **options})


class TestCanny(ControlFilterContract):
    def make(self) -> CannyFilter:
        return canny()


def test_edges_are_the_outline_of_a_box() -> None:
    image_BCHW = torch.zeros(1, 3, 40, 60, dtype=torch.uint8)
    image_BCHW[:, :, 10:30, 20:40] = 255
    edges_HW = both_halves(canny(resize=None), image_BCHW, 0)[0, 0]
    rows, columns = edges_HW.nonzero(as_tuple=True)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (9, 29, 19, 39)
    assert edges_HW.unique().tolist() == [0.0, 1.0]
    assert edges_HW[12:28, 22:38].sum() == 0


def test_edges_at_the_size_of_the_picture_are_soft_where_the_copy_is_smaller() -> None:
    edges_BCHW = both_halves(canny(resize=32), pictures(1, 64, 96), 0)
    assert edges_BCHW.shape == (1, 1, 64, 96)
    assert len(edges_BCHW.unique()) > 2


def test_a_flat_picture_has_none() -> None:
    assert both_halves(canny(), torch.full((1, 3, 33, 65), 77, dtype=torch.uint8), 0).abs().sum() == 0


def test_higher_thresholds_find_less() -> None:
    image_BCHW = pictures(1, 64, 96)
    assert both_halves(canny(low=1000, high=3000), image_BCHW, 0).sum() < both_halves(canny(), image_BCHW, 0).sum()
