from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from cascade_train.data.captions import Tags


def draws(tags: Tags, caption: str, /, count: int = 600, **values: Any) -> list[list[str]]:
    generator = torch.Generator().manual_seed(0)
    return [[tag for tag in tags.apply(caption, values, generator).split(", ") if tag] for _ in range(count)]


@pytest.mark.parametrize(
    ("separator", "caption", "expected"),
    [(",", " b,a ,, c", "b, a, c"), ("|", "b |a", "b| a"), (" ", "b  a", "b a"), (";", "", ""), (",", "solo", "solo")],
)
def test_tags_are_parted_and_joined(separator: str, caption: str, expected: str) -> None:
    assert Tags(separator=separator).apply(caption, {}, torch.Generator()) == expected


def test_shuffling_keeps_the_first_and_loses_none() -> None:
    orders = draws(Tags(separator=",", shuffle=True, keep_first=2), "a, b, c, d, e")
    assert all(order[:2] == ["a", "b"] and sorted(order) == list("abcde") for order in orders)
    counts = Counter(tuple(order[2:]) for order in orders)
    assert len(counts) == 6
    assert min(counts.values()) > 60


def test_dropping_keeps_order_and_the_first_and_leaves_out_its_share() -> None:
    orders = draws(Tags(separator=",", drop_prob=0.25, keep_first=1), "a, b, c, d, e")
    assert all(order[0] == "a" and order == sorted(order) for order in orders)
    assert sum(map(len, orders)) / 600 == pytest.approx(1 + 4 * 0.75, abs=0.15)


def test_tags_of_a_key_follow_the_caption_and_heavy_ones_come_early() -> None:
    listed = [{"tag": "heavy", "weight": 3.0}, "plain", {"tag": "light", "weight": 1}]
    orders = draws(Tags(key="tags", shuffle=True), "a, cat", tags=listed)
    assert all(order[:2] == ["a", "cat"] and len(order) == 5 for order in orders)
    firsts = Counter(order[2] for order in orders)
    assert firsts["heavy"] / 600 == pytest.approx(0.6, abs=0.07)
    seconds = Counter(order[3] for order in orders if order[2] == "heavy")
    assert seconds["plain"] / seconds["light"] == pytest.approx(1.0, abs=0.35)


def test_fewer_tags_are_drawn_by_weight() -> None:
    orders = draws(Tags(key="tags", shuffle=True, max_tags=1), "", tags={"often": 0.9, "seldom": 0.1})
    assert all(len(order) == 1 for order in orders)
    assert Counter(order[0] for order in orders)["seldom"] == pytest.approx(60, abs=30)


@pytest.mark.parametrize("tags", ["x, y", ["x", "y"], [{"tag": "x"}, {"name": "y", "weight": 2}], {"x": 1, "y": 2}])
def test_every_form_of_tags_is_read(tags: Any) -> None:
    assert Tags(key="tags").apply("a", {"tags": tags}, torch.Generator()) == "a, x, y"
