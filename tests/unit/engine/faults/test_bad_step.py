"""What makes a step bad, and which samples are at fault."""

import pytest
import torch

from cascade_train.engine.faults.bad_step import BadStepError, SpikeWatch, Trace, not_finite

NAN, INF = float("nan"), float("inf")


def trace(step, *losses, phase="main", norm=1.0):
    keys = tuple(f"{step}:{i}" for i in range(len(losses)))
    return Trace(step, phase, keys, torch.tensor(losses), torch.tensor(norm))


def watch(factor=4.0, window_steps=3):
    return SpikeWatch(factor=factor, window_steps=window_steps)


@pytest.mark.parametrize(
    ("bad", "keys", "said"),
    [
        (trace(7, 1.0, NAN, 2.0, INF), ("7:1", "7:3"), r"loss of 2 of 4 samples is not finite \(rank 0: 7:1, rank 0"),
        (trace(7, 1.0, 2.0, norm=INF), ("7:0", "7:1"), "every loss is finite but the gradient norm is inf"),
    ],
)
def test_what_is_not_finite_is_named(world, bad, keys, said):
    assert not bool(bad.is_finite())
    error = not_finite(bad)
    assert (error.step, error.keys, error.shared) == (7, keys, True)
    with pytest.raises(BadStepError, match=rf"Step 7, phase main: .*{said}.*weights are those of step 6"):
        raise error


def test_a_mean_loss_above_the_factor_times_the_median_is_bad(world):
    spikes = watch()
    spikes.check([trace(1, 1.0, 3.0), trace(2, 1.0, 1.0), trace(3, 90.0, 0.0)])
    spikes.check([trace(4, 4.0, 11.9)])  # 7.95 < 4 x 2, the median of 2, 1, 45
    with pytest.raises(
        BadStepError, match=r"the loss 32 is more than 4 times 7.95, .* 3 steps before \(rank 0: 5:1"
    ) as bad:
        spikes.check([trace(5, 0.2, 63.8)])
    assert (bad.value.step, bad.value.keys) == (5, ("5:1",))


def test_nothing_is_judged_before_the_window_is_full(world):
    spikes = watch()
    spikes.check([trace(1, 1.0), trace(2, 1.0), trace(3, 500.0)])
    assert spikes.state_dict() == {"main": [1.0, 1.0, 500.0]}


def test_every_step_of_every_phase_is_judged_once(world):
    spikes = watch()
    steps = [trace(step, loss, phase=phase) for step in (1, 2, 3) for phase, loss in (("a", 1.0), ("b", -1.0))]
    for count in range(len(steps)):
        spikes.check(steps[: count + 1])
    spikes.check(steps)
    assert spikes.state_dict() == {"a": [1.0] * 3, "b": [-1.0] * 3}
    spikes.check([trace(4, 100.0, phase="b")])  # no multiple of a negative median is a limit
    with pytest.raises(BadStepError, match="Step 4, phase a"):
        spikes.check([trace(4, 100.0, phase="a")])


def test_the_window_continues_where_it_was_saved(world):
    spikes, again = watch(), watch()
    spikes.check([trace(1, 1.0), trace(2, 1.0), trace(3, 1.0)])
    again.load_state_dict(spikes.state_dict())
    with pytest.raises(BadStepError, match="Step 2"):
        again.check([trace(2, 5.0)])  # a rollback comes by steps again
