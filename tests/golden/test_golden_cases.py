"""Our code against the original's numbers, case by case, exactly as `bench/parity.py` runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.parity_case import NotCoveredError, Variant, check, find_cases, variants
from bench.parity_cases import run
from bench.parity_networks import forward
from tests.golden.conftest import CASES

EXPECTED = {
    "adaptive_loss": 3,
    "bucketeer": 8,
    "conditions": 11,
    "control_filters": 18,
    "controlnet_modules": 7,
    "effnet_encoder": 2,
    "ema": 4,
    "gdf_diffuse": 8,
    "gdf_loss_weights": 19,
    "gdf_noise_conds": 15,
    "gdf_samplers": 13,
    "gdf_scalers_targets": 5,
    "gdf_schedules": 31,
    "lora": 3,
    "multifilter": 9,
    "previewer": 2,
    "pyramid_noise": 7,
    "retoken": 7,
    "stage_a_roundtrip": 2,
    "stage_b_forward": 6,
    "stage_c_cnet": 5,
    "stage_c_forward": 10,
    "train_steps_c": 2,
    "train_steps_lora": 2,
    "warmup_lr": 4,
}
"""How many variants each copied case has."""

NOT_COVERED = {"bucketeer/resize_pairs": "pictures are cut to their bucket's shape"} | {
    "multifilter/getter": "a json gives captions and filters here"
}
"""Variants that our code does not compute, by the start of the reason."""

OTHERS = "CASCADE_GOLDEN" in os.environ
FOUND = [variant for case in find_cases(CASES) for variant in variants(case) if OTHERS or case.name in EXPECTED]
NETWORKS = [v for v in FOUND if v.case.name in ("stage_b_forward", "stage_c_cnet", "stage_c_forward")]


@contextmanager
def skipped_where_not_covered() -> Iterator[None]:
    """Skip variants of another folder that our code does not compute; of the copied ones none is."""
    try:
        yield
    except NotCoveredError as reason:
        if not OTHERS:
            raise
        pytest.skip(f"not covered: {reason}")


@pytest.mark.parametrize("variant", [v for v in FOUND if repr(v) not in NOT_COVERED], ids=repr)
def test_our_code_gives_the_originals_numbers(variant: Variant) -> None:
    with skipped_where_not_covered():
        check(variant, run(variant))


@pytest.mark.parametrize("variant", [v for v in NETWORKS if repr(v) not in NOT_COVERED], ids=repr)
def test_networks_give_them_with_recomputation_too(variant: Variant) -> None:
    with skipped_where_not_covered():
        check(variant, forward(variant, recompute=True))


@pytest.mark.parametrize("variant", [v for v in FOUND if repr(v) in NOT_COVERED], ids=repr)
def test_what_is_not_covered_says_why(variant: Variant) -> None:
    with pytest.raises(NotCoveredError, match=NOT_COVERED[repr(variant)]):
        run(variant)


@pytest.mark.skipif(OTHERS, reason="CASCADE_GOLDEN names other cases, of any number")
def test_every_variant_of_every_copied_case_was_found() -> None:
    found = {case.name: len(variants(case)) for case in find_cases(CASES)}
    assert {name: found.get(name, 0) for name in EXPECTED} == EXPECTED
