"""Which captions training drops (case conditions): the original keeps those whose draw is above 0.05.

The stored draws of kept captions begin at 0.11. These tests move one of them to just above the share: by the rule,
which the case states as its formula, nothing else changes, so that the stored numbers stay the expected ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import parity_stage_b, parity_text
from bench.parity_case import Outcome, Variant, check

CAPTION_DRAWS = {"c_train": "draw.000.np_rand", "b_train": "draw.002.np_rand"}


def moved(variant: Variant, draw: float) -> Variant:
    """Return the variant with its first caption, which is kept, drawn at another number."""
    name, again = CAPTION_DRAWS[variant.name], Variant(variant.case, variant.name)
    draws = variant.inputs[name].clone()
    assert draws[0] == pytest.approx(0.11)
    draws[0] = draw
    again.inputs = {**variant.inputs, name: draws}
    return again


def run(variant: Variant, cond_drop_prob: float | None = None) -> Outcome:
    module = parity_stage_b if variant.args["stage"] == "b" else parity_text
    return module.conditions(variant, cond_drop_prob)


class TestDroppedCaptions:
    case = "conditions"

    @classmethod
    def takes(cls, variant: Any) -> bool:
        return variant.name in CAPTION_DRAWS

    @pytest.mark.parametrize("draw", [0.07, float(torch.nextafter(torch.tensor(0.05), torch.tensor(1.0)))])
    def test_a_caption_drawn_above_the_share_is_kept(self, variant: Any, draw: float) -> None:
        other = moved(variant, draw)
        check(other, run(other))

    def test_one_drawn_at_the_share_is_dropped(self, variant: Any) -> None:
        other = moved(variant, 0.05)
        with pytest.raises(AssertionError, match="off by"):
            check(other, run(other))

    @pytest.mark.parametrize("share", [0.1, 0.08])
    def test_another_share_fails(self, variant: Any, share: float) -> None:
        check(variant, run(variant, share))  # the stored draws do not tell
        other = moved(variant, 0.07)
        with pytest.raises(AssertionError, match="off by"):
            check(other, run(other, share))

    def test_both_stages_are_tried(self, variant_count: int) -> None:
        assert variant_count == 2
