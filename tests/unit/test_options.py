from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest

from cascade_train.errors import ConfigError
from cascade_train.options import (
    MOST_BLOCKS,
    Free,
    Positive,
    Rising,
    Several,
    Share,
    check_above,
    check_blocks,
    check_choice,
    check_fields,
    check_found,
    check_increasing,
    check_least,
    check_within,
)

CHECKS = [
    (lambda value: check_above("key", value, 0), [1, 0.1], [0, -1, math.nan], "must be greater than 0; give a larger"),
    (lambda value: check_least("key", value, 1, "why"), [1, None], [0, 0.9, math.nan], "must be at least 1: why"),
    (
        lambda value: check_within("key", value, 0.0, 2.0),
        [0.0, 2.0],
        [-1, 2.1, math.nan],
        r"\[0.0, 2.0\]; bring it inside",
    ),
    (lambda value: check_choice("key", value, ("a", "b")), ["b"], ["c"], "is unknown; choose one of a, b"),
    (partial(check_blocks, "key"), [0, MOST_BLOCKS, [2, 3]], [-1, MOST_BLOCKS + 1, [2, -1]], r"must lie in \[0, 1000"),
    (
        partial(check_increasing, "key"),
        [[0.1, 0.9]],
        [[1.0, 1.0], [2.0, 1.0], [1.0], [1.0, 2.0, 3.0], [math.nan, 1.0]],
        r"must be two numbers \[low, high\] with low < high; swap",
    ),
]


@pytest.mark.parametrize(("check", "good", "bad", "rule"), CHECKS)
def test_a_value_outside_its_range_is_refused_by_key(
    check: Callable[[Any], None], good: list[Any], bad: list[Any], rule: str
) -> None:
    for value in good:
        check(value)
    for value in bad:
        with pytest.raises(ConfigError, match=rule):
            check(value)


@dataclass
class Marked:
    lr: Free[Positive[float]] = 1.0
    steps: Several[int | None] = None
    beta: Share[float] = 0.5
    span: Rising[list[float]] | None = None
    kind: Literal["mean", "last"] | None = None
    shares: dict[str, float] | Literal["equal"] | None = None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "part.lr=0.0 must be greater than 0;"),
        ({"steps": 1}, "part.steps=1 must be greater than 1; give a larger part.steps, or null$"),
        ({"beta": 1.5}, r"part.beta=1.5 must lie in \[0.0, 1.0\]"),
        ({"beta": -0.5}, r"part.beta=-0.5 must lie in \[0.0, 1.0\]"),
        ({"span": [1.0, 1.0]}, "part.span=.*low < high"),
        ({"kind": "sum"}, "part.kind=sum is unknown; choose one of mean, last, or null$"),
    ],
)
def test_fields_are_checked_by_their_markers(changes: dict[str, Any], message: str) -> None:
    check_fields(Marked(shares={"a": 1.0}))
    with pytest.raises(ConfigError, match=message):
        check_fields(Marked(**changes), "part.")


def test_a_type_that_cannot_be_evaluated_leaves_the_others_to_be_checked() -> None:
    own = type("Own", (Marked,), {"__annotations__": {"given": "ImportedForTypesAlone"}})
    check_fields(own())
    with pytest.raises(ConfigError, match="lr=0.0 must be greater than 0"):
        check_fields(own(lr=0.0))


def test_an_expression_that_decides_nothing_is_refused() -> None:
    names = ["text_encoder.q\nold.q", "text_encoder_2.q", "network.q"]
    check_found("task.ranks", ["encoder_2", "old", "q"], names, "modules")
    with pytest.raises(ConfigError, match="'encoder_2' decides nothing, 'text_encoder' before it takes all 1 of its"):
        check_found("task.ranks", ["text_encoder", "encoder_2"], names, "modules")
    with pytest.raises(ConfigError, match="'q' decides nothing, 'old', 'encoder_2', 'net' before it takes all 3 of"):
        check_found("task.ranks", ["old", "encoder_2", "net", "q"], names, "modules")
    with pytest.raises(ConfigError, match="'zz' is found in no name of the 3 modules; they are such as text_en"):
        check_found("task.ranks", ["zz"], names, "modules")
