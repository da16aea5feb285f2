from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cascade_train.data.buckets import Buckets
from cascade_train.data.index.rows import ROW_FIELDS
from cascade_train.data.order.plan import Layouts, Plan, Start, Step, group, permutation, random_words, shard_numbers

SHARDS = np.repeat(np.arange(10), [5, 1, 7, 3, 9, 2, 8, 4, 6, 5])
LAYOUT = ("shards", "rows", "seed", "window_shards", "replacement", "ratios", "sizes", "random_share")


def layouts(
    *, shards: np.ndarray = SHARDS, rows: Any = None, ratios: Any = None, sizes: Any = None, **options: Any
) -> Layouts:
    """Lay out samples whose (width, height) are `sizes`."""
    table = Buckets(multiple_px=8).table(64, ratios)
    samples = np.zeros(len(shards), dtype=ROW_FIELDS)
    samples["shard"] = shards
    if sizes is not None:
        samples["width"], samples["height"] = sizes.T
    rows = np.arange(len(shards)) if rows is None else rows
    nearest = table.nearest(samples["width"][rows], samples["height"][rows])
    return Layouts(
        buckets=table,
        table=samples,
        rows=rows,
        own=group(rows, shard_numbers(samples["shard"][rows]), nearest, len(table.sizes_K2)),
        **{"random_share": 0.0, "seed": 0, "window_shards": 3, "replacement": False, **options},
    )


def plan(**options: Any) -> Plan:
    laid_out = layouts(**{key: options.pop(key) for key in LAYOUT if key in options})
    return Plan(layouts=laid_out, **{"global_batch_size": 7, "leftover": "carry", **options})


def pairs(step: Step) -> list[tuple[int, int]]:
    """Return (epoch, row) of the samples that count."""
    counted = np.ones(len(step.rows)) if step.weights is None else step.weights
    return [(e, r) for e, r, w in zip(step.epochs.tolist(), step.rows.tolist(), counted, strict=True) if w]


def stream(of: Plan, steps: int) -> list[tuple[int, int]]:
    return [pair for position in range(steps) for pair in pairs(of.step(position))]


def mixed(count: int, seed: int = 0) -> dict[str, Any]:
    """Return samples of several shapes in shards of several lengths, none or few of some shapes."""
    words = random_words(2 * count, seed, 0, "shapes").astype(np.int64) >> 20  # frozen, unlike numpy's generators
    widths = np.array([64, 64, 64, 128, 128, 48, 512])[words[:count] % 7]
    shards = np.sort(words[count:] % max(1, count // 6))
    ratios = ["1/1", "1/2", "3/4", "1/4"]
    return {"shards": shards, "sizes": np.stack([widths, np.full(count, 64)], axis=1), "ratios": ratios, "seed": seed}


def bucket_of(options: dict[str, Any]) -> np.ndarray:
    return Buckets(multiple_px=8).table(64, options["ratios"]).nearest(*options["sizes"].T)


def test_a_permutation_is_frozen() -> None:
    assert permutation(10, 0, 0, "shards").tolist() == [7, 9, 5, 0, 4, 1, 8, 6, 2, 3]
    assert permutation(10, 0, 1, "shards").tolist() == [2, 5, 0, 1, 4, 7, 3, 8, 9, 6]


def digest(of: Plan, steps: int) -> str:
    return hashlib.sha256(repr(stream(of, steps)).encode()).hexdigest()[:16]


def test_the_order_is_frozen() -> None:
    assert digest(plan(), 30) == "40c1c2cc4e71a295"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "96880df59554bf1e"),
        ({"leftover": "flush"}, "803a1152c4191994"),
        ({"random_share": 0.2}, "6d2fbbc01c37b51a"),
        ({"replacement": True}, "4cc44d9131dc2765"),
    ],
)
def test_the_order_in_buckets_is_frozen(changed: dict[str, Any], expected: str) -> None:
    assert digest(plan(**mixed(100), **changed), 40) == expected


@pytest.mark.parametrize("global_batch_size", [1, 7, 50, 128])
def test_epochs_follow_each_other_without_a_gap(global_batch_size: int) -> None:
    drawn = stream(plan(global_batch_size=global_batch_size), 300 // global_batch_size + 1)
    for epoch in range(6):
        part = drawn[epoch * 50 : (epoch + 1) * 50]
        assert {e for e, _ in part} == {epoch}
        assert sorted(row for _, row in part) == list(range(50))


@pytest.mark.parametrize("leftover", ["carry", "flush"])
@pytest.mark.parametrize("changed", [{}, mixed(90), {**mixed(90), "random_share": 0.3}, {"replacement": True}])
def test_any_position_is_found_without_the_ones_before(leftover: str, changed: dict[str, Any]) -> None:
    whole = plan(leftover=leftover, **changed)
    steps = [pairs(whole.step(position)) for position in range(60)]
    for position in (33, 2, 59, 0, 17):
        assert pairs(plan(leftover=leftover, **changed).step(position)) == steps[position]
        assert pairs(whole.step(position)) == steps[position]


@pytest.mark.parametrize("seed", range(8))
def test_steps_are_of_one_bucket_and_every_epoch_holds_every_sample_once(seed: int) -> None:
    count = 40 + 17 * seed
    options = mixed(count, seed)
    buckets, table = bucket_of(options), Buckets(multiple_px=8).table(64, options["ratios"])
    whole = plan(global_batch_size=3 + seed, window_shards=1 + seed % 3, **options)
    waiting: Counter[int] = Counter()
    drawn: list[tuple[int, int]] = []
    for position in range(whole.first_step(4)):
        step = whole.step(position)
        drawn += pairs(step)
        assert {tuple(table.sizes_K2[b]) for b in buckets[step.rows]} == {(step.height, step.width)}
    assert len(set(drawn)) == len(drawn)
    for epoch in range(4):
        waiting += Counter(buckets[[row for row in range(count) if (epoch, row) not in set(drawn)]].tolist())
    assert all(number < 3 + seed for number in waiting.values())


def test_steps_come_as_soon_as_their_bucket_holds_a_batch() -> None:
    options = mixed(120)
    whole = plan(**options)
    for epoch in range(1, 5):
        complete = sum(epoch * count // 7 for count in np.bincount(bucket_of(options)).tolist())
        assert whole.first_step(epoch) == complete
    assert [whole.epoch_of(whole.first_step(epoch)) for epoch in range(5)] == list(range(5))


def test_leftovers_are_flushed_with_weight_zero_for_what_fills_up() -> None:
    options = mixed(100)
    counts = np.bincount(bucket_of(options))
    flushing = plan(leftover="flush", **options)
    assert (counts % 7 > 0).any()
    assert flushing.first_step(3) == 3 * int(np.ceil(counts / 7).sum())
    for epoch in range(3):
        positions = range(flushing.first_step(epoch), flushing.first_step(epoch + 1))
        assert sorted(p for n in positions for p in pairs(flushing.step(n))) == [(epoch, r) for r in range(100)]
    short = [s for s in map(flushing.step, range(flushing.first_step(1))) if s.weights is not None]
    assert {len(step.rows) for step in short} == {7}
    for step in short:
        assert step.weights is not None
        count = int(step.weights.sum())
        assert step.weights.tolist() == [1.0] * count + [0.0] * (7 - count)
        assert set(step.rows[count:]) <= set(step.rows[:count])
        assert step.part(count - 1, 7).weights.tolist() == step.weights[count - 1 :].tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("leftover", ["carry", "flush"])
@pytest.mark.parametrize("seed", range(6))
def test_another_batch_size_continues_without_repeats_or_losses(leftover: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    count = int(generator.integers(30, 130))
    options = mixed(count, seed) | ({"random_share": 0.3} if seed % 3 == 2 else {})
    sizes = [int(size) for size in generator.integers(1, 9, size=4)]
    start, drawn = Start(), []
    for size in sizes:
        now = plan(leftover=leftover, global_batch_size=size, start=start, **options)
        stop = start.position + int(generator.integers(0, 3 * count // 2 // size))
        drawn += [pair for position in range(start.position, stop) for pair in pairs(now.step(position))]
        start = now.start_at(stop)
        again = plan(leftover=leftover, global_batch_size=size, start=start, **options)
        assert [pairs(again.step(stop + n)) for n in range(5)] == [pairs(now.step(stop + n)) for n in range(5)]
    assert len(set(drawn)) == len(drawn), "a sample came twice in an epoch"
    last = now.epoch_of(stop)
    missing = [(e, row) for e in range(last) for row in range(count) if (e, row) not in set(drawn)]
    rest = {pair for position in range(stop, now.first_step(last + 9)) for pair in pairs(now.step(position))}
    if leftover == "flush":
        assert not missing
    if leftover == "carry":
        assert len(set(missing) - rest) < 4 * 9, "only what waits in a bucket is not there yet"
    assert not rest & set(drawn)


def test_with_replacement_shards_come_again_before_others_come_once() -> None:
    shards = np.repeat(np.arange(60), 5)
    whole = plan(shards=shards, replacement=True, global_batch_size=10)
    drawn = stream(whole, 300)
    assert len(set(drawn)) == len(drawn), "each visit of a shard makes draws of its own"
    visits = Counter(shards[row] for visit, row in drawn if visit < 60)
    assert len(visits) < 50
    assert max(visits.values()) >= 10
    assert len({row for _, row in drawn}) > 290


def test_a_random_share_goes_to_any_bucket_anew_each_epoch() -> None:
    options = {**mixed(2000), "random_share": 0.2}
    table = Buckets(multiple_px=8).table(64, options["ratios"])
    whole, own = plan(global_batch_size=20, **options), bucket_of(options)
    elsewhere: list[set[int]] = [set(), set()]
    for position in range(whole.first_step(2)):
        step = whole.step(position)
        for row, epoch in zip(step.rows.tolist(), step.epochs.tolist(), strict=True):
            if tuple(table.sizes_K2[own[row]]) != (step.height, step.width):
                elsewhere[epoch].add(row)
    share = 0.2 * (1 - 1 / len(table.bucket_E))
    for rows in elsewhere:
        assert len(rows) == pytest.approx(2000 * share, rel=0.2)
    assert len(elsewhere[0] & elsewhere[1]) < 0.5 * len(elsewhere[0])
