from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from cascade_train.errors import ConfigError
from cascade_train.options import (
    Free,
    Positive,
    Rising,
    Several,
    Share,
    check_above,
    check_choice,
    check_fields,
    check_increasing,
    check_least,
    check_share,
    check_within,
)


def test_a_value_must_be_above_its_bound() -> None:
    check_above("steps", 1, 0)
    for value in (0, -1, math.nan):
        with pytest.raises(ConfigError, match=r"steps=.* must be greater than 0; give a larger steps"):
            check_above("steps", value, 0)


def test_a_value_must_be_at_least_its_bound_and_none_is_no_value() -> None:
    check_least("size", 1, 1, "it counts")
    check_least("size", None, 1, "it counts")
    for value in (0, -1, math.nan):
        with pytest.raises(ConfigError, match="size=.* must be at least 1: it counts"):
            check_least("size", value, 1, "it counts")


def test_a_share_must_lie_between_0_and_1() -> None:
    check_share("flip_prob", 0.0, "it is a share")
    check_share("flip_prob", 1.0, "it is a share")
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="flip_prob=.* must lie between 0 and 1: it is a share"):
            check_share("flip_prob", value, "it is a share")


def test_a_value_must_lie_between_its_bounds() -> None:
    check_within("beta", 0.0, 0.0, 1.0)
    check_within("beta", 1.0, 0.0, 1.0)
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match=r"beta=.* must lie in \[0.0, 1.0\]; bring it inside"):
            check_within("beta", value, 0.0, 1.0)


def test_a_name_must_be_one_of_the_choices() -> None:
    check_choice("sampler", "ddim", ("ddpm", "ddim"))
    with pytest.raises(ConfigError, match="sampler=heun is unknown; choose one of ddpm, ddim"):
        check_choice("sampler", "heun", ("ddpm", "ddim"))


@pytest.mark.parametrize("pair", [[1.0, 1.0], [2.0, 1.0], [1.0], [1.0, 2.0, 3.0], [math.nan, 1.0]])
def test_a_range_must_rise(pair: list[float]) -> None:
    check_increasing("clamp_range", [0.1, 0.9])
    with pytest.raises(ConfigError, match=r"clamp_range=.* must be two numbers \[low, high\] with low < high; swap"):
        check_increasing("clamp_range", pair)


@dataclass
class Marked:
    lr: Free[Positive[float]] = 1.0
    steps: Several[int | None] = None
    beta: Share[float] = 0.5
    span: Rising[list[float]] | None = None
    kind: Literal["mean", "last"] | None = None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "part.lr=0.0 must be greater than 0;"),
        ({"steps": 1}, "part.steps=1 must be greater than 1;"),
        ({"beta": 1.5}, r"part.beta=1.5 must lie in \[0.0, 1.0\]"),
        ({"beta": -0.5}, r"part.beta=-0.5 must lie in \[0.0, 1.0\]"),
        ({"span": [1.0, 1.0]}, "part.span=.*low < high"),
        ({"kind": "sum"}, "part.kind=sum is unknown; choose one of mean, last"),
    ],
)
def test_fields_are_checked_by_their_markers(changes: dict[str, Any], message: str) -> None:
    check_fields(Marked())
    with pytest.raises(ConfigError, match=message):
        check_fields(Marked(**changes), "part.")
