"""How many unreadable samples stop a run, and with which advice."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from cascade_train.batch import Unreadable
from cascade_train.data.loading.skipped import Skipped, most_unreadable
from cascade_train.errors import RunError


class Step(SimpleNamespace):
    """What is counted of a batch."""

    def __len__(self) -> int:
        return int(self.samples)


def step(samples: int, *names: str, reason: str = "cut") -> Any:
    return Step(samples=samples, skipped=tuple(Unreadable(name, reason) for name in names))


def test_a_few_of_many_do_not_stop_a_run_however_small_the_share() -> None:
    skipped = Skipped(64, 0.01)
    skipped.count(step(64, "a", "b", "c"))
    with pytest.raises(
        RunError, match="4 of 64 samples are unreadable, more than data.max_unreadable_share=0.01"
    ) as told:
        skipped.count(step(64, "d"))
    advised = re.search(r"data.max_unreadable_share=([0-9.]+)\. Another run", str(told.value))
    assert advised is not None
    Skipped(64, float(advised[1])).count(step(64, *"abcd"))


@pytest.mark.parametrize(
    ("samples", "share", "most"),
    [(1, 0.0, 0), (2, 0.01, 1), (5, 0.0, 2), (64, 0.01, 3), (1000, 0.01, 10), (4, 1.0, 4)],
)
def test_a_few_are_at_most_half(samples: int, share: float, most: float) -> None:
    assert most_unreadable(samples, share) == most


def test_a_sample_counts_once_whatever_the_reason_is_next_time() -> None:
    skipped = Skipped(8, 0.0)
    for place in range(5):
        skipped.count(step(8, "a", reason=f"{place} bytes are missing"))
    assert skipped.each == [Unreadable("a", "0 bytes are missing")]


def test_before_all_were_seen_a_few_more_than_the_share_may_be_met() -> None:
    skipped = Skipped(1000, 0.5)
    skipped.count(step(8, *"abcdefg"))
    with pytest.raises(RunError, match="8 of 8 samples"):
        Skipped(None, 0.5).count(step(8, *"abcdefgh"))
