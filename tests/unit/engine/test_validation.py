"""Moments that are gathered batch by batch, and over ranks, are those of the whole sets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cascade_train.batch import Batch
from cascade_train.engine.validation import HeldOut, SetDistance, Validation
from cascade_train.models.image_quality import frechet_distance
from cascade_train.tasks.base import StepOutput


def features(image_BCHW: Tensor) -> Tensor:
    return image_BCHW.mean(dim=(2, 3))


def pairs(count: int) -> tuple[Tensor, Tensor]:
    image, original = torch.rand(2, count, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    return image * 0.5, original


def wanted(image: Tensor, original: Tensor) -> float:
    sets = [features(each).double() for each in (image, original)]
    return frechet_distance(*(moment for each in sets for moment in (each.mean(dim=0), each.T.cov()))).item()


def test_batches_and_ranks_make_one_set_and_fillers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    image, original = pairs(12)
    ranks = [SetDistance(features=features, distance=frechet_distance) for _ in range(2)]
    for start in range(0, 12, 3):
        rows, counted = slice(start, start + 3), torch.tensor([1.0, 1.0, float(start < 9)])
        ranks[start % 2].add(image[rows], original[rows], counted)
    others = iter(ranks[1]._sums)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor.add_(next(others)))
    assert ranks[0].take().item() == pytest.approx(wanted(image[:11], original[:11]), rel=1e-9)
    assert wanted(image[:11], original[:11]) > 0.1


def test_each_time_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor)
    gathered = SetDistance(features=features, distance=frechet_distance)
    image, original = pairs(6)
    for first, second in ((image, original), (original, original)):
        gathered.add(first, second, torch.ones(6))
        assert gathered.take().item() == pytest.approx(wanted(first, second), abs=1e-6)


class ToyTask:
    """Measures what the keys of samples say."""

    def loss(self, prepared: Batch) -> StepOutput:
        loss_B = torch.tensor([float(key) for key in prepared.keys])
        return StepOutput(loss_B=loss_B, report={"loss_raw": 3 * loss_B})

    def prepare_batch(self, batch: Batch) -> Batch:
        return batch

    def measures(self, prepared: Batch, logsnr: Sequence[int]) -> dict[str, Tensor]:
        return {f"loss_logsnr_{level}": 2 * self.loss(prepared).loss_B for level in logsnr}


def toy_batch(losses: list[float], first: int, weights: list[float] | None = None) -> Batch:
    index_B = torch.arange(first, first + len(losses))
    return Batch(
        image_BCHW=None,
        captions=("",) * len(losses),
        keys=tuple(map(str, losses)),
        epoch_B=torch.zeros_like(index_B),
        index_B=index_B,
        seed=0,
        weight_B=None if weights is None else torch.tensor(weights),
    )


def test_the_loss_of_each_joined_source_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor)
    batches = [[toy_batch([1.0, 2.0, 6.0], 0)], [toy_batch([4.0, 100.0], 3, weights=[1.0, 0.0])]]
    task = ToyTask()
    phase = SimpleNamespace(phase=task, ema=None, roots=[], averaging=nullcontext)
    options = {"task": task, "phases": [phase], "logsnr": [0], "device": torch.device("cpu")}
    one = Validation(held_out=HeldOut(open=lambda: batches, steps=2), **options)  # type: ignore[arg-type]
    losses = {"validate/loss": 13 / 4, "validate/loss_raw": 39 / 4}
    assert one.run(curve=False) == losses
    assert one.run() == losses | {"validate/loss_logsnr_0": 26 / 4}
    joined = HeldOut(open=lambda: batches, steps=2, parts=("cats", "dogs", "birds"), part_of=lambda row: row % 2)
    found = Validation(held_out=joined, **options).run()  # type: ignore[arg-type]
    assert list(found) == [
        *("validate/loss", "validate/loss_raw", "validate/loss_logsnr_0"),
        *("validate/cats/loss", "validate/dogs/loss", "validate/birds/loss"),
    ]
    assert found["validate/cats/loss"] == (1 + 6) / 2
    assert found["validate/dogs/loss"] == (2 + 4) / 2, "a sample of weight 0 only fills its batch"
    assert torch.as_tensor(found["validate/birds/loss"]).isnan(), "no sample, no number"
    assert {name: found[name] for name in one.run()} == one.run()
