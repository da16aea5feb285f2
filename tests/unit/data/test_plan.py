from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from cascade_train.data.plan import Plan, permutation

SHARDS = np.repeat(np.arange(10), [5, 1, 7, 3, 9, 2, 8, 4, 6, 5])


def plan(**options: Any) -> Plan:
    defaults = {
        "shards": SHARDS,
        "rows": np.arange(len(SHARDS)),
        "seed": 0,
        "global_batch_size": 7,
        "window_shards": 3,
        "image_size": 64,
    }
    return Plan(**{**defaults, **options})


def stream(of: Plan, steps: int) -> list[tuple[int, int]]:
    pairs = []
    for position in range(steps):
        step = of.step(position)
        pairs += list(zip(step.epochs.tolist(), step.rows.tolist(), strict=True))
    return pairs


def test_a_permutation_is_frozen() -> None:
    assert permutation(10, 0, 0, "shards").tolist() == [7, 9, 5, 0, 4, 1, 8, 6, 2, 3]
    assert permutation(10, 0, 1, "shards").tolist() == [2, 5, 0, 1, 4, 7, 3, 8, 9, 6]


def test_the_order_is_frozen() -> None:
    assert hashlib.sha256(repr(stream(plan(), 30)).encode()).hexdigest()[:16] == "40c1c2cc4e71a295"


@pytest.mark.parametrize("global_batch_size", [1, 7, 50, 128])
def test_epochs_follow_each_other_without_a_gap(global_batch_size: int) -> None:
    pairs = stream(plan(global_batch_size=global_batch_size), 300 // global_batch_size + 1)
    for epoch in range(6):
        part = pairs[epoch * 50 : (epoch + 1) * 50]
        assert {e for e, _ in part} == {epoch}
        assert sorted(row for _, row in part) == list(range(50))


def test_the_batch_size_does_not_change_the_order() -> None:
    assert stream(plan(global_batch_size=10), 20) == stream(plan(global_batch_size=4), 50)


def test_any_position_is_found_without_the_ones_before() -> None:
    whole = plan()
    steps = [whole.step(position).rows.tolist() for position in range(40)]
    for position in (33, 2, 39, 0, 17):
        assert plan().step(position).rows.tolist() == steps[position]
        assert whole.step(position).rows.tolist() == steps[position]


def test_samples_mix_within_windows_of_shards_only() -> None:
    rows = [row for epoch, row in stream(plan(global_batch_size=50), 1) if epoch == 0]
    order = permutation(10, 0, 0, "shards")
    begin = 0
    for window in (order[:3], order[3:6], order[6:9], order[9:]):
        size = int(np.isin(SHARDS, window).sum())
        drawn = rows[begin : begin + size]
        assert set(SHARDS[drawn]) == set(window.tolist())
        assert drawn != sorted(drawn)
        begin += size


@pytest.mark.parametrize("changed", [{"seed": 1}, {"window_shards": 4}])
def test_the_order_depends_on(changed: dict[str, int]) -> None:
    assert stream(plan(), 7) != stream(plan(**changed), 7)


def test_a_subset_of_rows_is_kept() -> None:
    rows = np.array([0, 3, 5, 17, 18, 44, 49])
    pairs = stream(plan(rows=rows, shards=SHARDS[rows]), 3)
    assert [sorted(row for epoch, row in pairs if epoch == e) for e in range(3)] == [rows.tolist()] * 3


def test_one_sample_is_enough() -> None:
    assert stream(plan(rows=np.array([4]), shards=SHARDS[[4]], global_batch_size=3), 1) == [(0, 4), (1, 4), (2, 4)]


def test_a_step_has_one_size_and_parts() -> None:
    step = plan().step(0)
    assert (step.height, step.width) == (64, 64)
    assert step.rows.dtype == step.epochs.dtype == np.int64
    part = step.part(2, 5)
    assert part.rows.tolist() == step.rows[2:5].tolist()
    assert (len(part.epochs), part.height, part.width) == (3, 64, 64)


def test_planning_a_million_samples_is_fast() -> None:
    big = plan(shards=np.repeat(np.arange(1000), 1000), rows=np.arange(10**6), window_shards=16)
    rows = np.concatenate([big.step(position).rows for position in range(2000)])
    assert len(np.unique(rows)) == len(rows)
