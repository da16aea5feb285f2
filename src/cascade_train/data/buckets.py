"""Aspect-ratio buckets: which sizes pictures are trained at, and which size each picture takes.

Sizes follow from the ratios, the area and the multiple alone; pictures are assigned by the sizes in the index, never by
their pixels. An aspect ratio is width / height. The original's tables and choices: Stable Cascade, core/data/bucketeer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from cascade_train.data.index.rows import Index
from cascade_train.data.index.selection import Selection
from cascade_train.options import Positive, Share, check_fields, check_least

PRESETS: dict[str, tuple[str, ...]] = {
    "original": ("1/1", "1/2", "1/3", "2/3", "3/4", "1/5", "2/5", "3/5", "4/5", "1/6", "5/6", "9/16"),
    "wide": ("1/1", "7/8", "3/4", "2/3", "4/7", "1/2", "3/7", "3/8", "1/3", "2/7", "1/4"),
}
"""Lists of aspect ratios by name: of the original's training files, and in even steps to 4:1. Reciprocals are added."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BucketTable:
    """The sizes that pictures are trained at."""

    sizes_K2: np.ndarray  # (K, 2) int64, height and width of each bucket in pixels, all different
    ratio_E: np.ndarray  # (E,) width / height of the entries that pictures are compared with
    bucket_E: np.ndarray  # (E,) int64, the bucket of each entry: two ratios may round to one size
    distance: Literal["log", "linear", "exact"]
    """How far a picture is from an entry: `log` = |ln(a / b)|, `linear` = |a - b|; `exact` = it has a bucket's size."""

    @property
    def identity(self) -> str:
        """8 hex digits that change with any size, ratio, or the distance."""
        text = repr((self.sizes_K2.tolist(), self.ratio_E.tolist(), self.bucket_E.tolist(), self.distance))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def nearest(self, width_N: np.ndarray, height_N: np.ndarray) -> np.ndarray:
        """Bucket nearest to each picture, (N,) int64, the first of equals; sizes in pixels, 0 counts as square."""
        if self.distance == "exact":
            sides = (self.sizes_K2.T, (height_N, width_N))
            size_K, size_N = (height.astype(np.int64) << 32 | width.astype(np.int64) for height, width in sides)
            order = np.argsort(size_K)
            bucket_N = order[np.searchsorted(size_K[order], size_N).clip(max=len(order) - 1)]
            return np.where(size_K[bucket_N] == size_N, bucket_N, 0)  # the first where the size is unknown
        known = (width_N > 0) & (height_N > 0)
        ratio_N = np.where(known, width_N, 1) / np.where(known, height_N, 1)
        entry_N, other = (np.log(ratio_N), np.log(self.ratio_E)) if self.distance == "log" else (ratio_N, self.ratio_E)
        order = np.argsort(other, kind="stable")
        above = np.searchsorted(other[order], entry_N).clip(1, max(1, len(order) - 1))
        below, above = order[above - 1], order[np.minimum(above, len(order) - 1)]
        first, second = np.minimum(below, above), np.maximum(below, above)
        is_second = np.abs(other[second] - entry_N) < np.abs(other[first] - entry_N)
        return self.bucket_E[np.where(is_second, second, first)]

    def enlargement(self, bucket_N: np.ndarray, width_N: np.ndarray, height_N: np.ndarray) -> np.ndarray:
        """Factor by which each picture is scaled to cover its bucket, (N,); 0 = unknown."""
        known = (width_N > 0) & (height_N > 0)
        height_of, width_of = self.sizes_K2[bucket_N].T
        scale = np.maximum(width_of / np.maximum(width_N, 1), height_of / np.maximum(height_N, 1))
        return np.where(known, scale, 0.0)


def exact_table(sizes_K2: np.ndarray) -> BucketTable:
    """Buckets of samples that an index lists with the sizes they are trained at."""
    ratio_K = sizes_K2[:, 1] / sizes_K2[:, 0]
    return BucketTable(sizes_K2=sizes_K2, ratio_E=ratio_K, bucket_E=np.arange(len(sizes_K2)), distance="exact")


@dataclass(kw_only=True)
class Buckets:
    """How sizes are made of aspect ratios, how pictures find theirs, and which are too small."""

    multiple_px: Positive[int] = 32
    distance: Literal["log", "linear"] = "log"
    random_share: Share[float] = 0.0
    max_upscale: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "data.buckets.")
        check_least("data.buckets.max_upscale", self.max_upscale, 1.0, "1 enlarges none; null = no limit")

    def table(self, image_size: int, aspect_ratios: list[str | float] | str | None) -> BucketTable:
        """Sizes of about image_size² pixels; aspect_ratios None = the square alone.

        With the distance `log`, pictures are compared with the rounded sizes, so that the least is cropped; with
        `linear`, with the ratios as they are configured. A ratio too extreme for the area is a ValueError.
        """
        if aspect_ratios is None:
            square, first = np.full((1, 2), image_size), np.zeros(1, dtype=np.int64)
            return BucketTable(sizes_K2=square, ratio_E=np.ones(1), bucket_E=first, distance="log")
        ratio_E = with_reciprocals(parse_ratios(aspect_ratios))
        size_E2 = np.array([bucket_size(ratio, image_size**2, self.multiple_px) for ratio in ratio_E])
        thin = np.flatnonzero(size_E2.min(axis=1) == 0)
        if len(thin):
            text = f"leaves a side below data.buckets.multiple_px={self.multiple_px} at data.image_size={image_size}"
            raise ValueError(f"data.aspect_ratios: {ratio_E[thin[0]]:g} {text}: leave it out, or train larger pictures")
        sizes: dict[tuple[int, int], int] = {}
        bucket_E = np.array([sizes.setdefault((height, width), len(sizes)) for height, width in size_E2.tolist()])
        shape_E = size_E2[:, 1] / size_E2[:, 0] if self.distance == "log" else np.array(ratio_E)
        return BucketTable(sizes_K2=np.array(list(sizes)), ratio_E=shape_E, bucket_E=bucket_E, distance=self.distance)

    def selection(self, index: Index, table: BucketTable) -> Selection:
        """Which samples need no more enlargement than `max_upscale`, a number; an unknown size needs none."""
        assert self.max_upscale is not None
        width_N, height_N = index.table["width"].astype(np.int64), index.table["height"].astype(np.int64)
        scale_N = table.enlargement(table.nearest(width_N, height_N), width_N, height_N)
        reason = f"would be enlarged by more than data.buckets.max_upscale={self.max_upscale:g}"
        return Selection(kept=scale_N <= self.max_upscale, reason=reason)


def parse_ratios(aspect_ratios: list[str | float] | str) -> list[float]:
    """Parse the aspect ratios of a preset, or a list of fractions and decimals; else a ValueError."""
    if isinstance(aspect_ratios, str):
        if aspect_ratios not in PRESETS:
            known = ", ".join(PRESETS)
            raise ValueError(f"data.aspect_ratios={aspect_ratios} is no preset: choose {known}, or list [1/1,3/4]")
        return parse_ratios(list(PRESETS[aspect_ratios]))
    if not aspect_ratios:
        raise ValueError("data.aspect_ratios=[] leaves no size to train at: null trains squares")
    return [_ratio(entry) for entry in aspect_ratios]


def with_reciprocals(ratios: Iterable[float]) -> list[float]:
    """Ratios, each once, followed by the reciprocals that were not among them."""
    ratios = list(dict.fromkeys(ratios))
    return list(dict.fromkeys([*ratios, *(1 / ratio for ratio in ratios)]))


def bucket_size(ratio: float, area: int, multiple_px: int) -> tuple[int, int]:
    """(height, width) of at most `area` pixels in this ratio, rounded down to multiples."""
    height, width = math.sqrt(area / ratio), math.sqrt(area * ratio)
    return int(height // multiple_px) * multiple_px, int(width // multiple_px) * multiple_px


def _ratio(entry: str | float) -> float:
    try:
        ratio = float(Fraction(str(entry).replace(":", "/").replace(" ", "")))
    except (ValueError, ZeroDivisionError, OverflowError):
        ratio = 0.0
    if not ratio > 0:
        raise ValueError(f"data.aspect_ratios: {entry!r} is no ratio of width to height, as 3/4, 16/9 or 0.5 are")
    return ratio
