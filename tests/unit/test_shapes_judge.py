"""The judge of shapes pictures: right on the procedure's own, and about what is there, not about what was asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.shapes_judge import ATTRIBUTES, accuracies, judge
from cascade_train.data.shapes import POSITIONS, RADII, SHAPES, Scene, Shapes

OPTIONS: Any = {"crop": "center", "shuffle_window_shards": 1, "num_workers": 0, "worker_start": "fork"}


@pytest.fixture(scope="module")
def drawn() -> list[tuple[Scene, np.ndarray]]:
    source = Shapes(image_size=96, samples=200, seed=31, **OPTIONS)
    return [(scene, np.asarray(picture) / 255) for scene, _, picture in map(source.draw, range(200))]


def test_every_attribute_is_read_off_the_procedures_own_pictures(drawn: list[tuple[Scene, np.ndarray]]) -> None:
    scenes, pictures = zip(*drawn, strict=True)
    assert {scene.shape for scene in scenes} == set(SHAPES)
    assert {scene.position for scene in scenes} == set(POSITIONS)
    found = accuracies(pictures, scenes)
    assert found.keys() == {*ATTRIBUTES, "all"}
    assert min(found.values()) >= 0.99


def test_what_was_asked_for_does_not_matter(drawn: list[tuple[Scene, np.ndarray]]) -> None:
    scene, picture = drawn[0]
    others: dict[str, tuple[str, ...]] = {"shape": SHAPES, "size": tuple(RADII), "position": tuple(POSITIONS)}
    for attribute, words in others.items():
        other = next(word for word in words if word != getattr(scene, attribute))
        found = accuracies([picture], [replace(scene, **{attribute: other})])
        assert found[attribute] == 0.0
        assert found["all"] == 0.0
        assert sum(found.values()) == len(ATTRIBUTES) - 1


def test_an_object_on_the_left_and_one_on_the_right_are_sides() -> None:
    rows = [Shapes(image_size=96, samples=1, seed=31, only=["sides"], **OPTIONS).draw(row) for row in range(100)]
    draws = np.random.default_rng(0)
    pictures = [np.clip(np.asarray(picture) / 255 + draws.normal(0, 0.04, (96, 96, 3)), 0, 1) for *_, picture in rows]
    assert min(accuracies(pictures, [scene for scene, *_ in rows]).values()) >= 0.98
    halves = [np.where(np.arange(96)[:, None] < 48, picture, picture[0, 0]) for picture in pictures]
    assert {judge(half)["position"] for half in halves} == {"left"}
