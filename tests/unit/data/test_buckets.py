from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cascade_train.data.buckets import (
    PRESETS,
    Buckets,
    BucketTable,
    bucket_size,
    parse_ratios,
    with_reciprocals,
)
from cascade_train.data.index.rows import Index
from tests.unit.data import tars


def table(ratios: Any, image_size: int = 768, **options: Any) -> BucketTable:
    return Buckets(**options).table(image_size, ratios)


def nearest(of: BucketTable, *sizes: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return (height, width) of the bucket of each (width, height)."""
    width, height = np.array(sizes).T
    return [tuple(size) for size in of.sizes_K2[of.nearest(width, height)].tolist()]


def enlarged(of: BucketTable, *sizes: tuple[int, int]) -> list[float]:
    width, height = np.array(sizes).T
    found: list[float] = of.enlargement(of.nearest(width, height), width, height).tolist()
    return found


def test_ratios_are_fractions_or_decimals_and_reciprocals_are_added_once() -> None:
    assert parse_ratios(["1/1", 0.5, "16/9", "3:4", 2, "0.75"]) == [1.0, 0.5, 16 / 9, 0.75, 2.0, 0.75]
    assert with_reciprocals([1.0, 0.5, 2.0, 0.75, 0.75]) == [1.0, 0.5, 2.0, 0.75, 4 / 3]


def test_sizes_have_about_the_area_and_are_multiples() -> None:
    for name in PRESETS:
        for image_size in (384, 768, 1024):
            found = table(name, image_size)
            height, width = found.sizes_K2.T
            assert (found.sizes_K2 % 32 == 0).all()
            assert (height * width <= image_size**2).all()
            assert (height * width >= 0.6 * image_size**2).all()
            assert {(w, h) for h, w in found.sizes_K2.tolist()} == {(h, w) for h, w in found.sizes_K2.tolist()}
            assert len(np.unique(found.sizes_K2, axis=0)) == len(found.sizes_K2)
    wide = table("wide").sizes_K2
    assert (wide[:, 1] / wide[:, 0]).max() == 4.0
    assert len(table("original").sizes_K2) == 21


def test_the_nearest_ratio_is_by_logarithm_or_by_the_originals_difference() -> None:
    ratios = ["1/1", "1/2"]
    assert bucket_size(2.0, 768**2, 32) == (512, 1056)
    assert nearest(table(ratios), (1430, 1000), (1390, 2000)) == [(768, 768), (1056, 512)]
    assert nearest(table(ratios), (1450, 1000), (1000, 1450)) == [(512, 1056), (1056, 512)]
    assert nearest(table(ratios, distance="linear"), (1450, 1000), (1000, 1450)) == [(768, 768), (1056, 512)]


def test_nearest_agrees_with_comparing_every_entry() -> None:
    words = np.random.Philox(key=0).random_raw(4000).reshape(2, -1) % np.uint64(3000) + np.uint64(1)
    width, height = words.astype(np.int64)
    for distance in ("log", "linear"):
        found = table("original", distance=distance)
        own = np.log(width / height) if distance == "log" else width / height
        entries = np.log(found.ratio_E) if distance == "log" else found.ratio_E
        expected = found.bucket_E[np.abs(own[:, None] - entries).argmin(axis=1)]
        assert (found.nearest(width, height) == expected).all()


def index(*sizes: tuple[int, int]) -> Index:
    width, height = np.array(sizes).T
    return tars.index(["k"] * len(sizes), width=width, height=height)


def test_pictures_that_would_be_enlarged_too_much_are_left_out() -> None:
    pictures = index((768, 768), (600, 2000), (512, 512), (0, 0), (1056, 512), (500, 1100))
    found = table(["1/1", "1/2"])
    assert enlarged(found, (768, 768), (384, 768), (0, 0)) == [1.0, 1056 / 768, 0.0]

    def kept(**options: Any) -> list[bool]:
        return Buckets(**options).selection(pictures, found).kept.tolist()

    assert kept(max_upscale=1.0) == [True, True, False, True, True, False]
    assert kept(max_upscale=1.03) == [True, True, False, True, True, True]
    reason = Buckets(max_upscale=1.5).selection(pictures, found).reason
    assert reason == "would be enlarged by more than data.buckets.max_upscale=1.5"


@pytest.mark.parametrize(
    ("ratios", "image_size", "words"),
    [
        ("extreme", 768, "aspect_ratios=extreme is no preset: choose original, wide"),
        ([], 768, r"aspect_ratios=\[\] leaves no size"),
        *(([text], 768, f"'{text}' is no ratio of width") for text in ("0/1", "1/0", "-1", "wide", "nan", "1e999")),
        ([20], 96, r"20 leaves a side below data.buckets.multiple_px=32 at data.image_size=96"),
    ],
)
def test_ratios_that_are_none_are_refused(ratios: Any, image_size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        table(ratios, image_size)
