from __future__ import annotations

from typing import Any

import pytest
import torch

from cascade_train.diffusion.adaptive_schedule import AdaptiveTrainSchedule
from cascade_train.errors import ConfigError


def make(**changes: Any) -> AdaptiveTrainSchedule:
    return AdaptiveTrainSchedule(
        **{"logsnr_range": [-10.0, 10.0], "buckets": 4, "min_probs": 0.0, "beta": 0.0} | changes
    )


def learned(**changes: Any) -> AdaptiveTrainSchedule:
    """A schedule whose four buckets have seen the losses 1, 2, 3 and 4."""
    schedule = make(**changes)
    schedule.after_step(torch.tensor([-7.0, -2.0, 2.0, 7.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    return schedule


def test_a_fresh_schedule_is_uniform() -> None:
    u_B = torch.linspace(0, 0.99, 50)
    torch.testing.assert_close(make().sample(u_B), u_B * 20 - 10, atol=1e-5, rtol=0)


def test_levels_are_drawn_in_proportion_to_the_loss() -> None:
    logsnr_B = learned().sample((torch.arange(10000) + 0.5) / 10000)
    share = torch.histc(logsnr_B, bins=4, min=-10, max=10) / 10000
    torch.testing.assert_close(share, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=1e-3, rtol=0)


def test_a_floor_makes_the_shares_more_equal() -> None:
    logsnr_B = learned(min_probs=10.0).sample((torch.arange(10000) + 0.5) / 10000)
    share = torch.histc(logsnr_B, bins=4, min=-10, max=10) / 10000
    torch.testing.assert_close(share, torch.tensor([11.0, 12.0, 13.0, 14.0]) / 50, atol=1e-3, rtol=0)


def test_a_bucket_without_loss_is_never_drawn() -> None:
    schedule = make()
    schedule.after_step(torch.tensor([-7.0, 2.0]), torch.tensor([0.0, 0.0]))
    logsnr_B = schedule.sample(torch.linspace(0, 1 - 2**-24, 1000))
    assert logsnr_B.isfinite().all()
    inside = logsnr_B[1:-1]
    assert (((inside >= -5) & (inside <= 0)) | (inside >= 5)).all()


def test_time_is_the_quantile_of_the_learned_distribution() -> None:
    schedule = learned()
    torch.testing.assert_close(
        schedule(torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])), torch.tensor([-10.0, -5.0, 0.0, 5.0, 10.0])
    )


def test_samples_outside_the_range_teach_the_nearest_bucket() -> None:
    schedule = make()
    schedule.after_step(torch.tensor([-30.0, 10.0, 30.0]), torch.tensor([3.0, 4.0, 6.0]))
    torch.testing.assert_close(schedule.state_dict()["bucket_loss"], torch.tensor([3.0, 1.0, 1.0, 5.0]))


def test_samples_outside_the_range_teach_the_first_bucket_where_asked_for() -> None:
    schedule = make(outside="first")
    schedule.after_step(torch.tensor([30.0]), torch.tensor([3.0]))
    torch.testing.assert_close(schedule.state_dict()["bucket_loss"], torch.tensor([3.0, 1.0, 1.0, 1.0]))


def test_what_was_learned_is_restored() -> None:
    fresh = make()
    fresh.load_state_dict(learned().state_dict())
    u_B = torch.rand(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fresh.sample(u_B), learned().sample(u_B))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_probs": -1.0}, "min_probs=-1.0 must lie in"),
        ({"outside": "drop"}, "outside=drop is unknown; choose one of nearest, first"),
    ],
)
def test_options_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)
