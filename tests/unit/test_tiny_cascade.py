"""What is asked of the tiny cascade, and how its answers are counted; what it paints, the bench itself measures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from bench.tiny_cascade import decibels, shapes, unseen

OPTIONS: dict[str, Any] = {"samples": 1000, "seed": 0, "only": ["circle", "square", "red", "blue"], "names": None}
OTHERS: dict[str, Any] = {"samples": 600, "seed": 3, "only": ["square", "red"]}
"""What another stage was trained on."""


@pytest.fixture(scope="module")
def truth() -> Any:
    return unseen([shapes(OPTIONS, 96), shapes(OPTIONS | OTHERS, 96)], 40)


def test_no_scene_that_is_asked_for_was_trained_on(truth: Any) -> None:
    seen = {shapes(OPTIONS, 96).draw(row)[0] for row in range(1000)}
    others = {shapes(OPTIONS | OTHERS, 96).draw(row)[0] for row in range(600)}
    assert len(seen) > 400
    assert len(others - seen) > 20
    assert not others & set(truth.scenes)
    assert len(set(truth.scenes)) == 40
    assert not seen & set(truth.scenes)
    assert {scene.shape for scene in truth.scenes} == {"circle", "square"}
    assert all(scene.position in caption for scene, caption in zip(truth.scenes, truth.captions, strict=True))


def test_decibels_are_those_of_the_pictures_and_of_the_bilinear_baseline(truth: Any) -> None:
    off_by_one = [np.where(picture < 128, picture + 1, picture - 1).astype(np.uint8) for picture in truth.pictures]
    images = torch.from_numpy(np.stack(truth.pictures)).permute(0, 3, 1, 2).double() / 255
    coarse = functional.interpolate(functional.avg_pool2d(images, 32), (96, 96), mode="bilinear")
    expected = (-10 * (coarse - images).square().mean(dim=(1, 2, 3)).log10()).mean().item()
    found, bilinear = decibels(off_by_one, truth, 32)
    assert found == pytest.approx(48.13, abs=0.01)
    assert bilinear == pytest.approx(expected, abs=0.01)
