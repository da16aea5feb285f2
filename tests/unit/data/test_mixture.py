"""Sources as one: shares, repetition, weights, and the same order for all."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cascade_train.data.buckets import Buckets
from cascade_train.data.captions import Captions
from cascade_train.data.index.rows import repeat_counts, split
from cascade_train.data.mixture import Mixture, Regularised
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import DatasetContract, loading
from tests.unit.data.test_shapes import shapes

ORDER = ("image_size", "crop", "shuffle_window_shards", "num_workers", "worker_start")


def mixture(sizes: dict[str, int], **options: Any) -> Mixture:
    """Mix procedural pictures, as many of each name as `sizes` says."""
    order = {key: options.pop(key) for key in ORDER if key in options}
    sources = {name: shapes(samples=size, seed=place, **order) for place, (name, size) in enumerate(sizes.items())}
    return mixture_of(sources, **options)


def mixture_of(sources: Mapping[str, Source], **options: Any) -> Mixture:
    """Mix sources, with the first one's options of the order."""
    top = {key: getattr(next(iter(sources.values())), key) for key in ORDER}
    return Mixture(sources=dict(sources), **{"repeats": None, "shares": None, "loss_weights": None, **top, **options})


def counts(source: Mixture) -> Counter[str]:
    """Return how many rows each source has."""
    return Counter(key.decode().partition("/")[0] for key in source.open().keys.tolist())


class TestMixture(DatasetContract):
    order_digest = "b646e2e75ce09689"
    samples = 37

    @classmethod
    def make_source(cls, folder: Path, **options: Any) -> Mixture:
        return mixture({"a": 6, "b": 10, "c": 5}, repeats={"a": 2.5, "c": 2.4}, **options)


SIDES = [(96, 64), (64, 64), (48, 32), (128, 256), (70, 80), (32, 32)]
"""Width and height of pictures."""


def pictures(folder: Path) -> Path:
    """Return a tar of noise pictures."""
    members = []
    for number, (width, height) in enumerate(SIDES):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
        members += [(f"{number:02d}.png", file.getvalue()), (f"{number:02d}.txt", b"noise")]
    return tars.write(folder / "pictures.tar", members)


RATIOS: dict[str, Any] = {"aspect_ratios": ["1/1", "3/2"], "buckets": Buckets(multiple_px=8)}


def trained(source: Source, samples: int) -> dict[tuple[str, int, int], torch.Tensor]:
    """Return the picture of each key and size that comes in an epoch."""
    found = {}
    with loading(source, global_batch_size=1, micro_batch_size=1) as loader:
        for batch in (next(loader)[0] for _ in range(samples)):
            height, width = batch.image_BCHW.shape[2:]
            found[batch.keys[0].rpartition("/")[2], height, width] = batch.image_BCHW
    assert len(found) == samples
    return found


def test_each_picture_trains_at_the_size_of_each_source(tmp_path: Path) -> None:
    path = pictures(tmp_path)
    sources = {f"s{size}": tars.webdataset(path, image_size=size, crop="center") for size in (32, 64)}
    found = trained(mixture_of(sources, **RATIOS), 2 * len(SIDES))
    alone = {}
    for size in (32, 64):
        alone |= trained(tars.webdataset(path, image_size=size, crop="center", **RATIOS), len(SIDES))
    assert {side for _, *side in map(list, found) for side in side} == {24, 32, 48, 64, 72}
    assert found.keys() == alone.keys()
    assert all(torch.equal(picture, alone[key]) for key, picture in found.items())


def test_a_picture_of_two_sizes_is_held_out_at_both(tmp_path: Path) -> None:
    sources = {f"s{size}": shapes(samples=200, image_size=size) for size in (32, 64)}
    index = mixture_of(sources).open()
    keys = [{index.keys[row].decode().partition("/")[2] for row in rows} for rows in split(index, 0.3)]
    assert not set.intersection(*keys)
    assert len(keys[0]) + len(keys[1]) == 200
    around = mixture_of({"both": mixture_of(sources), "other": shapes(samples=5, seed=1)}).open()
    inner = [{around.keys[row].decode().rpartition("/")[2] for row in rows} for rows in split(around, 0.3)]
    assert len(inner[0]) + len(inner[1]) == len(set.union(*inner))


def test_a_picture_of_two_sources_is_held_out_of_both() -> None:
    index = mixture_of({name: shapes(samples=200) for name in ("a", "b")}).open()
    keys = [{index.keys[row].decode().partition("/")[2] for row in rows} for rows in split(index, 0.3)]
    assert not set.intersection(*keys)
    other = mixture_of({"a": shapes(samples=5), "b": shapes(samples=5, seed=1)}).open()
    assert other.split_by is None, "as in runs so far"


def test_a_mixture_of_sizes_resumes_in_its_order(tmp_path: Path) -> None:
    def make(size: int = 64) -> Mixture:
        sources = {"a": shapes(samples=7), "b": shapes(samples=10, seed=1, image_size=size)}
        return mixture_of(sources, flip_prob=0.5)

    with loading(make(), global_batch_size=2, micro_batch_size=2) as loader:
        steps = [next(loader)[0] for _ in range(12)]
        assert {step.image_BCHW.shape[-1] for step in steps} == {32, 64}
        loader.seek(5)
        state = loader.state_dict()
    with loading(make(), global_batch_size=2, micro_batch_size=2) as again:
        again.load_state_dict(state)
        for step in steps[5:]:
            batch = next(again)[0]
            assert batch.keys == step.keys
            assert torch.equal(batch.image_BCHW, step.image_BCHW)
    with loading(make(48)) as other, pytest.raises(ConfigError, match="does not fit this run's data"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"a": 10, "b": 40, "c": 7}),
        ({"repeats": {"a": 2.5, "b": 0.3}}, {"a": 25, "b": 12, "c": 7}),
        ({"shares": "equal"}, {"a": 40, "b": 40, "c": 40}),
        ({"shares": {"a": 2, "b": 1, "c": 1}}, {"a": 80, "b": 40, "c": 40}),
        ({"shares": {"a": 0.05, "b": 0.9, "c": 0.05}}, {"a": 10, "b": 180, "c": 10}),
    ],
)
def test_sources_come_as_often_as_they_should(options: dict[str, Any], expected: dict[str, int]) -> None:
    assert counts(mixture({"a": 10, "b": 40, "c": 7}, **options)) == expected


def test_fractions_take_the_same_samples_every_time_and_move_few_when_some_are_added() -> None:
    source = mixture({"a": 10, "b": 1}, repeats={"a": 1.5})
    found = Counter(source.open().keys.tolist())
    assert sorted(found.values()) == [1] * 6 + [2] * 5
    assert Counter(mixture({"a": 10, "b": 1}, repeats={"a": 1.5}).open().keys.tolist()) == found
    keys = [str(number).encode() for number in range(1000)]
    few, more = repeat_counts(keys[:900], 0.3), repeat_counts(keys, 0.3)
    assert (few.sum(), more.sum()) == (270, 300)
    assert (few != more[:900]).sum() < 40


def test_rows_read_from_their_source_with_its_captions_and_weight() -> None:
    parts = {
        "a": shapes(samples=3, captions=Captions(template="one: {caption}")),
        "b": shapes(samples=4, seed=1, captions=Captions(template="two: {caption}")),
    }
    source = mixture_of(parts, loss_weights={"b": 0.25})
    with loading(source, global_batch_size=7, micro_batch_size=7) as loader:
        (batch,) = next(loader)
    is_a = [key.startswith("shapes-seed0") for key in batch.keys]
    assert sum(is_a) == 3
    assert batch.weight_B is not None
    assert torch.equal(batch.weight_B, torch.tensor([1.0 if a else 0.25 for a in is_a]))
    assert all(text.startswith("one: " if a else "two: ") for text, a in zip(batch.captions, is_a, strict=True))
    index = source.open()
    assert all(index.name(row).partition("/")[2] == source.read(row).key for row in range(7))


def test_every_window_holds_the_share_and_keeps_what_lies_together_close(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("cascade_train.data.mixture.LEAST_BLOCK", 200)
    for shard in range(8):
        tars.write(tmp_path / f"{shard}.tar", tars.samples(range(shard * 40, shard * 40 + 40)))
    big, small = tars.webdataset(tmp_path / "{0..7}.tar"), tars.webdataset(tmp_path / "0.tar")
    source = mixture_of({"big": big, "small": small}, repeats={"small": 2.0})
    index = source.open()
    assert len(index.shards) == 2
    for shard in range(2):
        names = [index.name(row) for row in range(len(index)) if index.table["shard"][row] == shard]
        assert sum("small/" in name for name in names) == 40
        assert {name.partition("big/")[2][0] for name in names if "big/" in name} == set(
            "0123" if shard == 0 else "4567"
        )


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
        steps = [next(loader) for _ in range(18)]
    own = [[key.startswith("shapes-seed0") for batch in step for key in batch.keys] for step in steps]
    assert 8 <= min(map(sum, own)) <= max(map(sum, own)) <= 32
    weights = [torch.cat([batch.weight_B for batch in step]).tolist() for step in steps]
    assert weights == [[1.0 if is_own else 0.25 for is_own in step] for step in own]
