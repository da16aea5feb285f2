from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cascade_train.diffusion.loss_weight import (
    AdaptiveLossWeight,
    ComposedLossWeight,
    ConstantLossWeight,
    DebiasedLossWeight,
    LossWeight,
    MinSNRGammaLossWeight,
    MinSNRLossWeight,
    MinSNRPlusOneLossWeight,
    P2LossWeight,
    SechLossWeight,
    SigmoidLossWeight,
    SNRLossWeight,
    SNRPlusOneLossWeight,
    TruncatedSNRLossWeight,
)
from cascade_train.diffusion.scaling import VPScaling
from cascade_train.errors import ConfigError

LOGSNR = torch.linspace(-9, 9, 37)
P2 = P2LossWeight(k=1.0, gamma=1.0, s=1.0)
WEIGHTS: tuple[LossWeight, ...] = (
    ConstantLossWeight(v=2.5),
    SNRLossWeight(),
    P2,
    SNRPlusOneLossWeight(),
    MinSNRLossWeight(max_snr=5.0),
    MinSNRPlusOneLossWeight(max_snr=5.0),
    TruncatedSNRLossWeight(min_snr=1.0),
    SechLossWeight(div=2.0),
    DebiasedLossWeight(),
    SigmoidLossWeight(s=1.0),
    ComposedLossWeight(mul=[SNRLossWeight()], div=[SNRPlusOneLossWeight()]),
)


def adaptive(**changes: Any) -> AdaptiveLossWeight:
    options = {"logsnr_range": [-10.0, 10.0], "buckets": 300, "weight_range": [1e-7, 1e7], "beta": 0.5}
    return AdaptiveLossWeight(**options | changes)


@pytest.mark.parametrize("weight", [*WEIGHTS, adaptive()], ids=lambda w: type(w).__name__)
def test_a_weight_is_positive_finite_and_fp32(weight: LossWeight) -> None:
    weight_B = weight(LOGSNR.double())
    assert weight_B.dtype == torch.float32
    assert weight_B.shape == LOGSNR.shape
    assert weight_B.isfinite().all()
    assert (weight_B > 0).all()


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda w: type(w).__name__)
def test_a_shift_looks_up_the_weight_at_less_noise(weight: LossWeight) -> None:
    torch.testing.assert_close(replace(weight, shift=2.0)(LOGSNR), weight(LOGSNR + 2 * math.log(2)))


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda w: type(w).__name__)
def test_a_clamp_bounds_the_weight(weight: LossWeight) -> None:
    torch.testing.assert_close(replace(weight, clamp_range=[0.2, 3.0])(LOGSNR), weight(LOGSNR).clamp(0.2, 3.0))


def test_without_a_clamp_a_billion_is_the_most() -> None:
    assert SNRLossWeight()(torch.tensor([50.0])) == 1e9


def test_p2_of_the_training_scripts_is_the_noises_variance() -> None:
    torch.testing.assert_close(P2(LOGSNR), VPScaling()(LOGSNR)[1].square(), rtol=1e-3, atol=0)


def test_velocity_and_epsilon_weights_agree_through_snr_plus_one() -> None:
    composed = ComposedLossWeight(mul=[SNRLossWeight()], div=[SNRPlusOneLossWeight()])
    torch.testing.assert_close(composed(LOGSNR), LOGSNR.sigmoid())


def test_weights_without_state_learn_nothing() -> None:
    for weight in WEIGHTS:
        before = weight(LOGSNR)
        weight.after_step(LOGSNR, torch.full_like(LOGSNR, 9.0))
        assert weight.state_dict() == {}
        assert torch.equal(weight(LOGSNR), before)


def test_an_adaptive_weight_tends_to_one_over_the_loss() -> None:
    weight = adaptive()
    for _ in range(60):
        weight.after_step(LOGSNR, LOGSNR.exp())
    torch.testing.assert_close(weight(LOGSNR) * LOGSNR.exp(), torch.ones_like(LOGSNR))


def test_an_adaptive_weight_changes_only_where_it_saw_samples() -> None:
    weight = adaptive(buckets=5, logsnr_range=[-6.0, 6.0])
    weight.after_step(torch.tensor([-1.0, -1.5]), torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(
        weight(torch.tensor([-7.0, -3.0, -1.0, 3.0, 7.0])), torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0])
    )


def test_samples_beyond_the_range_have_buckets_of_their_own() -> None:
    weight = adaptive(buckets=5, logsnr_range=[-6.0, 6.0])
    assert weight.bucket(torch.tensor([-60.0, -6.0, -5.9, 6.0, 6.1, 60.0])).tolist() == [0, 0, 1, 3, 4, 4]


def test_an_adaptive_weight_stays_in_its_range() -> None:
    weight = adaptive(weight_range=[0.1, 2.0], beta=0.0)
    weight.after_step(torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 1e6]))
    torch.testing.assert_close(weight(torch.tensor([-1.0, 1.0])), torch.tensor([2.0, 0.1]))


def test_the_last_of_duplicates_wins_where_asked_for() -> None:
    weight = adaptive(duplicates="last", beta=0.0)
    weight.after_step(torch.tensor([1.0, -5.0, 1.0, 5.0]), torch.tensor([2.0, 5.0, 4.0, 1.0]))
    assert weight(torch.tensor([1.0])) == 0.25


def test_a_composed_weight_keeps_the_state_of_its_parts() -> None:
    def make() -> ComposedLossWeight:
        return ComposedLossWeight(mul=[P2, adaptive()], div=[adaptive(buckets=7)])

    weight, fresh = make(), make()
    weight.after_step(LOGSNR, LOGSNR.exp())
    assert {name: value.shape for name, value in weight.state_dict().items()} == {
        "mul.1.bucket_loss": (300,),
        "div.0.bucket_loss": (7,),
    }
    saved = weight.state_dict()
    fresh.load_state_dict(saved)
    assert torch.equal(fresh(LOGSNR), weight(LOGSNR))
    assert not torch.equal(fresh(LOGSNR), make()(LOGSNR))
    weight.after_step(LOGSNR, 2 * LOGSNR.exp())
    assert torch.equal(fresh.state_dict()["mul.1.bucket_loss"], saved["mul.1.bucket_loss"]), "a copy"


def test_state_of_another_number_of_buckets_is_refused() -> None:
    with pytest.raises(ConfigError, match="buckets=4, but the saved state has 7"):
        adaptive(buckets=4).load_state_dict({"bucket_loss": torch.ones(7)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(P2, k=0.0), "k=0.0 must be greater"),
        (lambda: MinSNRGammaLossWeight(gamma=5.0, target="noise"), "target=noise is unknown"),
        (lambda: ComposedLossWeight(mul=[], div=[]), "leave nothing to compose; name at least one"),
        (lambda: adaptive(buckets=2), "buckets=2 must be greater"),
        (lambda: adaptive(update="epoch"), "update=epoch is unknown"),
    ],
)
def test_values_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_adaptive_weight_learns_from_steps_or_from_micro_batches_never_from_both() -> None:
    logsnr_B, loss_B = torch.tensor([0.0, 3.0]), torch.tensor([4.0, 2.0])
    for update, learns, ignores in (
        ("step", "after_step", "after_micro_batch"),
        ("micro_batch", "after_micro_batch", "after_step"),
    ):
        weight = adaptive(update=update)
        getattr(weight, ignores)(logsnr_B, loss_B)
        assert torch.equal(weight(logsnr_B), torch.ones(2))
        getattr(weight, learns)(logsnr_B, loss_B)
        torch.testing.assert_close(weight(logsnr_B), 1 / (0.5 + 0.5 * loss_B))


def test_parts_of_a_composed_weight_learn_from_micro_batches() -> None:
    part = adaptive(update="micro_batch")
    ComposedLossWeight(mul=[part, P2], div=[]).after_micro_batch(torch.zeros(1), torch.tensor([3.0]))
    assert part(torch.zeros(1)) == 0.5


@pytest.mark.parametrize("target", ["epsilon", "v", "x0"])
def test_min_snr_gamma_is_the_weight_in_x0_whatever_is_predicted(target: str) -> None:
    divisor = {"epsilon": [SNRLossWeight()], "v": [SNRPlusOneLossWeight()], "x0": []}[target]
    composed = ComposedLossWeight(mul=[MinSNRLossWeight(max_snr=5.0)], div=divisor)
    weight = MinSNRGammaLossWeight(gamma=5.0, target=target)
    torch.testing.assert_close(weight(LOGSNR), composed(LOGSNR))
