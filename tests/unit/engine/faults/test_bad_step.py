"""Which samples of a step are at fault, and what goes on without them."""

import pytest
import torch

from cascade_train.engine.faults.bad_step import Trace, not_finite

NAN, INF = float("nan"), float("inf")


def trace(step, *losses, norm=1.0):
    keys = tuple(f"{step}:{i}" for i in range(len(losses)))
    return Trace(step, "main", keys, torch.tensor(losses), torch.tensor(norm))


def test_samples_at_fault_are_named_with_the_key_that_leaves_them_out(world):
    bad = trace(7, 1.0, NAN, 2.0, INF)
    assert not bool(bad.is_finite())
    error = not_finite(bad, excluded=["it's"])
    assert error.shared
    text = str(error)
    assert text.startswith("Step 7, phase main: the loss of 2 of 4 samples is not finite (rank 0: 7:1, rank 0: 7:3).")
    assert """ 'data.exclude=["7:1", "7:3", "it'"'"'s"]' """ in text


@pytest.mark.parametrize("bad", [trace(7, 1.0, 2.0, norm=INF), trace(7, NAN, NAN), trace(7, 1.0, *[NAN] * 9)])
def test_no_sample_is_blamed_where_none_stands_out(world, bad):
    text = str(not_finite(bad))
    assert "data.exclude" not in text
    assert "Remedy: lower optimizer.lr" in text
