"""Holes have random forms, or those of salient things; pictures are kept around them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cascade_train.filters.inpaint import InpaintFilter, SaliencyNetwork, gaussian_blur, random_mask, salient_mask
from tests.unit.filters.filter_contract import ControlFilterContract, OfFiles, both_halves, generators, pictures


def inpaint(**options: object) -> InpaintFilter:
    return InpaintFilter(**{"weights": None, "threshold": [0.04, 0.4], "p_outpaint": 0.4, **options})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return weights that no one trained."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("files") / "saliency_model.pt"
    torch.save(SaliencyNetwork().state_dict(), path)
    return str(path)


class TestRandomHoles(ControlFilterContract):
    def make(self) -> InpaintFilter:
        return inpaint()


class TestSalientHoles(OfFiles, ControlFilterContract):
    def make(self) -> InpaintFilter:
        return inpaint(weights=self.files, threshold=[0.3, 0.6])


class TestSalientHolesWithoutDraws(TestSalientHoles):
    def make(self) -> InpaintFilter:
        return inpaint(weights=self.files, threshold=[0.45, 0.45], p_outpaint=1.0)


class Half(torch.nn.Module):
    """Finds the left half of any picture salient, at 0.5."""

    def forward(self, image_BCHW: Tensor) -> Tensor:
        saliency_BCHW = torch.zeros(len(image_BCHW), 1, 30, 30)
        saliency_BCHW[..., :15] = 0.5
        return saliency_BCHW


def test_the_picture_is_kept_outside_the_hole_and_is_one_inside() -> None:
    image_BCHW = pictures(4, 64, 96)
    map_BCHW = both_halves(inpaint(), image_BCHW, 0, 1, 2, 3)
    hole_B1HW = map_BCHW[:, 3:].bool()
    assert torch.equal(map_BCHW[:, :3], torch.where(hole_B1HW, 1.0, image_BCHW.float() / 255))
    assert map_BCHW[:, 3:].unique().tolist() == [0.0, 1.0]


def test_holes_are_boxes_and_strokes_of_moderate_size() -> None:
    masks = [torch.from_numpy(random_mask(64, 96, g)).float() for g in generators(*range(60))]
    shares = torch.stack([mask.mean() for mask in masks])
    assert shares.min() > 0.0
    assert shares.max() < 0.75
    assert 0.05 < shares.mean() < 0.5
    boxes = [is_box(mask[0]) for mask in masks]
    assert 15 < sum(boxes) < 45


def is_box(mask_HW: Tensor) -> bool:
    rows, columns = mask_HW.any(dim=1).sum(), mask_HW.any(dim=0).sum()
    return bool(mask_HW.sum() == rows * columns)


@pytest.mark.parametrize("p_outpaint", [0.0, 1.0])
def test_outpainting_turns_the_hole_around(p_outpaint: float) -> None:
    seeds = range(8)
    holes = torch.cat([both_halves(inpaint(p_outpaint=p_outpaint), pictures(1, 64, 96), s)[:, 3:] for s in seeds])
    drawn = torch.stack([torch.from_numpy(random_mask(64, 96, g)) for g in generators(*seeds)]).float()
    assert torch.equal(holes, 1 - drawn if p_outpaint else drawn)


def test_thresholds_and_turns_of_salient_holes_are_those_of_each_sample() -> None:
    image_BCHW = torch.rand(3, 3, 90, 120)
    threshold = torch.tensor([0.4, 0.6, 0.4]).view(3, 1, 1, 1)
    outpaint = torch.tensor([False, False, True]).view(3, 1, 1, 1)
    mask_B1HW = salient_mask(Half(), image_BCHW, threshold, outpaint)
    left = torch.zeros(90, 120, dtype=torch.bool)
    left[:, :60] = True
    assert torch.equal(mask_B1HW[:, 0], torch.stack([left, torch.zeros_like(left), ~left]))


def test_the_share_of_outpainting_and_the_thresholds_are_drawn_in_their_range(files: str) -> None:
    transform = inpaint(weights=files).sample_transform()
    image = pictures(1, 8, 8)[0].numpy()
    drawn = [transform(image, g) for g in generators(*range(300))]
    thresholds = torch.tensor([each["control_threshold"].item() for each in drawn])
    assert 0.04 <= thresholds.min() < 0.06
    assert 0.38 < thresholds.max() < 0.4
    assert 0.32 < sum(each["control_outpaint"].item() for each in drawn) / 300 < 0.48


def test_a_blur_is_a_gaussian_that_mirrors_borders() -> None:
    point = torch.zeros(1, 1, 41, 61)
    point[..., 20, 30] = 1.0
    found = gaussian_blur(point, 21)
    assert found.sum().item() == pytest.approx(1.0, abs=1e-5)
    sigma = 0.15 * 21 + 0.35
    assert (found[0, 0, 23, 30] / found[0, 0, 20, 30]).item() == pytest.approx(math.exp(-4.5 / sigma**2), rel=1e-4)
    assert found[0, 0, 20, 33].item() == pytest.approx(found[0, 0, 23, 30].item())
    torch.testing.assert_close(gaussian_blur(torch.ones(1, 1, 3, 500), 141), torch.ones(1, 1, 3, 500))
