"""Moments that are gathered batch by batch, and over ranks, are those of the whole sets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cascade_train.engine.validation import SetDistance
from cascade_train.models.image_quality import frechet_distance


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
