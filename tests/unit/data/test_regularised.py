"""Two sources as one: shares, repetition, weights, and the same order for all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from cascade_train.data.mixture import Regularised
from cascade_train.errors import ConfigError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import DatasetContract, loading
from tests.unit.data.test_shapes import shapes

ORDER = ("image_size", "crop", "shuffle_window_shards", "num_workers", "worker_start")


def regularised(own: int = 5, others: int = 32, **options: Any) -> Regularised:
    order = {key: options.pop(key) for key in ORDER if key in options}
    source = shapes(samples=own, only=["star"], names={"star": "[star]"}, **order)
    other = shapes(samples=others, seed=1, only=["circle"], **order)
    top = {key: getattr(source, key) for key in ORDER}
    return Regularised(source=source, regularisation=other, **{"share": 0.5, "weight": 0.25, **top, **options})


class TestRegularised(DatasetContract):
    order_digest = "b646e2e75ce09689"
    samples = 37

    @classmethod
    def make_source(cls, folder: Path, **options: Any) -> Regularised:
        return regularised(share=0.9, **options)


@pytest.mark.parametrize(
    ("own", "others", "share", "times"),
    [(5, 32, 0.5, (6, 1)), (32, 5, 0.5, (1, 6)), (10, 10, 0.5, (1, 1)), (10, 30, 0.2, (12, 1)), (10, 30, 0.8, (1, 1))],
)
def test_the_smaller_side_is_repeated_until_the_share_is_met(
    own: int, others: int, share: float, times: tuple[int, int]
) -> None:
    source = regularised(own, others, share=share)
    index = source.open()
    names = Counter(source.read(row).key for row in range(len(index)))
    counts = {
        side: {n for key, n in names.items() if key.startswith(side)} for side in ("shapes-seed0", "shapes-seed1")
    }
    assert (counts["shapes-seed0"], counts["shapes-seed1"]) == ({times[0]}, {times[1]})
    assert all(index.name(row) == f"regularised:{source.read(row).key}" for row in range(len(index)))


def test_every_batch_holds_about_the_share_however_small_a_side_and_its_windows_are() -> None:
    with loading(regularised(4, 400, shuffle_window_shards=1), global_batch_size=40) as loader:
        steps = [[key for batch in next(loader) for key in batch.keys] for _ in range(18)]
    own = [sum(key.startswith("shapes-seed0") for key in keys) for keys in steps]
    assert 8 <= min(own) <= max(own) <= 32


def test_regularisation_samples_carry_their_weight_into_the_batch() -> None:
    with loading(regularised()) as loader:
        batches = [batch for _ in range(8) for batch in next(loader)]
    weights = torch.cat([batch.weight_B for batch in batches]).tolist()
    is_own = [key.startswith("shapes-seed0") for batch in batches for key in batch.keys]
    assert weights == [1.0 if own else 0.25 for own in is_own]
    assert 0.3 < sum(is_own) / len(is_own) < 0.7


def test_a_repeated_picture_is_another_sample_with_draws_of_its_own() -> None:
    with loading(regularised()) as loader:
        batches = [batch for _ in range(7) for batch in next(loader)]
    draws: dict[str, list[float]] = {}
    for batch in batches:
        for key, epoch, number in zip(
            batch.keys, batch.epoch_B.tolist(), batch.uniform("timestep").tolist(), strict=True
        ):
            if epoch == 0:
                draws.setdefault(key, []).append(number)
    assert max(len(numbers) for numbers in draws.values()) > 3
    assert all(len(set(numbers)) == len(numbers) for numbers in draws.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.0}, "data.share=1.0 must lie between 0 and 1: it is the regularisation's part"),
        ({"weight": 0.0}, "data.weight=0.0 must be above 0: it multiplies the regularisation's loss"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regularised(**options)


def test_sides_of_another_size_are_refused() -> None:
    source = regularised()
    small = shapes(image_size=16)
    options = {key: getattr(source, key) for key in ORDER}
    with pytest.raises(ValueError, match="data.regularisation.image_size=16 differs from data.image_size=32"):
        Regularised(source=source.source, regularisation=small, share=0.5, weight=1.0, **options)


def test_each_side_leaves_out_what_its_own_filters_refuse() -> None:
    source = regularised(6, 6)
    source.regularisation = shapes(samples=6, seed=1, size_filters={"width": "> 1000"})
    with pytest.raises(ConfigError, match="6 of 6 samples do not meet data.size_filters"):
        source.open()
    source.regularisation = shapes(samples=6, seed=1, size_filters={"width": "> 1"})
    assert len(source.open()) == 12


def test_streams_are_no_side() -> None:
    source = regularised()
    source.regularisation = tars.webdataset(["pipe:true"], image_size=source.image_size)
    with pytest.raises(ConfigError, match="streams cannot be mixed with other samples: give tars that"):
        source.open()
