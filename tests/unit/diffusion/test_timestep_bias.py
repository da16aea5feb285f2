from __future__ import annotations

from typing import Any

import pytest
import torch

from cascade_train.diffusion.timestep_bias import TimestepBias
from cascade_train.errors import ConfigError

PLAIN: dict[str, Any] = {"strategy": "none", "multiplier": 1.0, "begin": 0.0, "end": 1.0, "portion": 0.25}
U_B = (torch.arange(100_000) + 0.5) / 100_000
SPANS = [("earlier", (0.0, 0.25)), ("later", (0.75, 1.0)), ("range", (0.2, 0.5))]


def bias(**options: Any) -> TimestepBias:
    return TimestepBias(**PLAIN | options)


@pytest.mark.parametrize(("strategy", "span"), SPANS)
@pytest.mark.parametrize("multiplier", [0.5, 2.0, 10.0])
def test_the_span_is_drawn_as_often_as_discrete_weights_would(
    strategy: Any, span: tuple[float, float], multiplier: float
) -> None:
    """Weights of 1000 timesteps: 1, and `multiplier` inside the span, normalised (as seed scripts give them)."""
    t_B = 1 - bias(strategy=strategy, multiplier=multiplier, begin=0.2, end=0.5)(U_B)
    weights = torch.ones(1000)
    weights[round(span[0] * 1000) : round(span[1] * 1000)] *= multiplier
    drawn = torch.histc(t_B, bins=1000, min=0, max=1) / len(U_B)
    torch.testing.assert_close(drawn, weights / weights.sum(), atol=2.5e-5, rtol=0)


@pytest.mark.parametrize("strategy", ["none", "earlier", "later", "range"])
def test_bent_numbers_stay_in_order_and_in_range(strategy: Any) -> None:
    u_B = torch.cat([torch.zeros(1), U_B, torch.tensor([1 - 2**-24])])
    bent_B = bias(strategy=strategy, multiplier=3.0, begin=0.1, end=0.2)(u_B)
    assert bent_B.dtype == torch.float32
    assert bent_B.shape == u_B.shape
    assert (bent_B.diff() >= 0).all()
    assert bent_B.min() >= 0
    assert bent_B.max() < 1


def test_nothing_changes_without_a_strategy_or_with_a_multiplier_of_one() -> None:
    assert bias(multiplier=5.0)(U_B) is U_B
    assert bias(strategy="later")(U_B) is U_B


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "middle"}, "timestep_bias.strategy=middle is unknown"),
        ({"multiplier": 0.0}, "timestep_bias.multiplier=0.0 must be greater than"),
        ({"portion": 0.0}, "timestep_bias.portion=0.0 must be greater than"),
        ({"begin": 200.0}, "timestep_bias.begin=200.0 must lie in"),
        ({"begin": 0.6, "end": 0.5}, "timestep_bias.begin=0.6 must lie below timestep_bias.end=0.5"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bias(**options)
