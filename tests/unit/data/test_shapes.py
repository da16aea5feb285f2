from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.data.shapes import COLOURS, POSITIONS, RADII, SHAPES, Shapes
from tests.unit.data import tars
from tests.unit.data.dataset_contract import DatasetContract

WORDS = {*COLOURS, *SHAPES, *RADII, *" ".join(POSITIONS).split()} | {
    *("a", "an", "the", "on", "at", "in", "of", "with", "shape", "background", "and", "photo")
}


def shapes(**options: Any) -> Shapes:
    return Shapes(**{**tars.ORDER, "image_size": 32, "samples": 37, "seed": 0, **options})


class TestShapes(DatasetContract):
    order_digest = "b646e2e75ce09689"
    samples = 37

    @classmethod
    def make_source(cls, folder: Path, **options: Any) -> Shapes:
        return shapes(**options)


def test_a_picture_depends_on_seed_and_row_alone() -> None:
    first, longer, other = shapes(), shapes(samples=500), shapes(seed=1)
    for row in range(20):
        assert first.draw(row)[:2] == longer.draw(row)[:2]
        assert np.array_equal(first.read(row).image, longer.read(row).image)
    assert sum(first.draw(row)[0] == other.draw(row)[0] for row in range(37)) < 3
    assert first.open().digest != other.open().digest


def test_objects_can_be_limited_and_captions_can_call_them_otherwise() -> None:
    plain, stars = shapes(samples=200), shapes(samples=200, only=["star", "red", "blue"], names={"star": "[star]"})
    scenes, captions = zip(*(stars.draw(row)[:2] for row in range(200)), strict=True)
    assert {scene.shape for scene in scenes} == {"star"}
    assert {scene.colour for scene in scenes} == {"red", "blue"}
    assert {scene.size for scene in scenes} == set(RADII)
    assert len({scene.background for scene in scenes}) > 8
    assert sum("[star]" in caption for caption in captions) > 150
    assert not any(re.search(r"(?<!\[)star", caption) for caption in captions)
    assert stars.open().digest != plain.open().digest
    renamed = shapes(samples=200, names={"star": "[star]"})
    assert [renamed.draw(row)[0] for row in range(200)] == [plain.draw(row)[0] for row in range(200)]


def test_a_caption_says_what_the_scene_shows() -> None:
    source = shapes(samples=600)
    complete = 0
    for row in range(600):
        scene, caption, _ = source.draw(row)
        assert f"{scene.background} background" in caption
        assert f"{scene.colour} {scene.shape}" in caption or f"{scene.colour} shape" in caption
        assert f"the {scene.position} " in f"{caption} " or not re.search(r" the ", caption)
        assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", caption)
        complete += scene.shape in caption and scene.size in caption and f"the {scene.position}" in caption
    assert 0.7 < complete / 600 < 0.86


def test_the_object_lies_in_its_cell_and_inside_the_picture() -> None:
    source, seen = shapes(samples=2000, image_size=96), Counter[str]()
    for row in range(400):
        scene, _, picture = source.draw(row)
        pixels = np.asarray(picture).astype(int)
        object_ = np.abs(pixels - pixels[0, 0]).sum(axis=-1) > 30
        ys, xs = np.nonzero(object_)
        cell = int((xs.min() + xs.max()) / 2 // 32), int((ys.min() + ys.max()) / 2 // 32)
        assert cell == POSITIONS[scene.position]
        area = object_.mean()
        assert (area < 0.05) if scene.size == "small" else (area > 0.02)
        seen[scene.position] += 1
    assert min(seen[position] for position in POSITIONS) > 20


def test_sides_put_the_same_object_left_and_right_and_are_in_no_picture_unasked() -> None:
    both, left, right = (shapes(image_size=96, only=[place, "star"]) for place in ("sides", "left", "right"))
    for row in range(30):
        scene, caption, picture = both.draw(row)
        assert scene.position == "sides"
        assert "the sides" in caption or " the " not in caption
        halves = [np.asarray(each.draw(row)[2])[:, half] for each, half in ((left, np.s_[:48]), (right, np.s_[48:]))]
        assert np.array_equal(np.asarray(picture), np.concatenate(halves, axis=1))
    assert not any(shapes(samples=600).draw(row)[0].position == "sides" for row in range(600))


def test_the_loss_can_count_less_beside_the_object() -> None:
    plain, weighted = shapes(image_size=96), shapes(image_size=96, background_weight=0.2)
    for row in range(20):
        sample = weighted.read(row)
        assert plain.read(row).mask is None
        assert np.array_equal(sample.image, plain.read(row).image)
        assert set(np.unique(sample.mask)) == {51, 255}
        pixels = sample.image.astype(int)
        object_ = np.abs(pixels - pixels[0, 0]).sum(axis=-1) > 30
        assert (sample.mask[object_] == 255).all()
        assert 1.2 < (sample.mask == 255).sum() / object_.sum() < 9.0
    assert plain.open().digest == weighted.open().digest
