"""What a set of samples is like: sizes, shapes, what cannot be read, what is there twice, and the captions.

Sizes come from the index, the rest from reading samples. How it is shown is decided elsewhere.
"""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from cascade_train.batch import sample_seed
from cascade_train.data.data_set import Rows
from cascade_train.data.decoding.decode import decode
from cascade_train.data.sample import RawSample, UnreadableSampleError

ORIENTATION = 0x0112
"""The EXIF tag of how a picture is turned; 1 = not."""


@dataclass(frozen=True, kw_only=True)
class BucketCount:
    """The samples of one training size.

    Attributes:
        height: in pixels.
        width: in pixels.
        samples: how many.
        enlarged: how many of them are smaller.
    """

    height: int
    width: int
    samples: int
    enlarged: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Survey:
    """What a set of samples is like.

    Attributes:
        samples: of an epoch.
        pictures: how many are left where those that come more than once count once.
        width_N: of the pictures in pixels, upright; 0 where the header cannot be read.
        height_N: the same.
        buckets: the training sizes that occur, most samples first.
        cropped: mean share of a picture that is cut away.
        read: how many pictures were read and decoded.
        unreadable: name and reason of those that could not be.
        rotated: names of those that EXIF turns.
        twice: names of pictures with the same content, together.
        captions: name -> caption of those that could be read, as in the first epoch.
    """

    samples: int
    pictures: int
    width_N: np.ndarray
    height_N: np.ndarray
    buckets: tuple[BucketCount, ...]
    cropped: float
    read: int
    unreadable: tuple[tuple[str, str], ...]
    rotated: tuple[str, ...]
    twice: tuple[tuple[str, ...], ...]
    captions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Reading:
    name: str
    digest: bytes
    caption: str
    is_rotated: bool
    fault: str


def survey(part: Rows, *, read: int | None, seed: int) -> Survey:
    """Look at samples.

    Args:
        part: opened; not a stream.
        read: how many pictures to read and decode, evenly spread; None = all.
        seed: of the first epoch's captions.
    """
    index = part.index
    rows = _different(part)
    chosen = rows if read is None else rows[np.unique(np.linspace(0, len(rows) - 1, read).round().astype(np.int64))]
    readings = list(_readings(part, chosen, seed))
    width_N, height_N = (index.table[name][rows].astype(np.int64) for name in ("width", "height"))
    buckets, cropped = _buckets(part)
    return Survey(
        samples=len(part.rows),
        pictures=len(rows),
        width_N=width_N,
        height_N=height_N,
        buckets=buckets,
        cropped=cropped,
        read=len(readings),
        unreadable=tuple((each.name, each.fault) for each in readings if each.fault),
        rotated=tuple(each.name for each in readings if each.is_rotated),
        twice=_twice(readings),
        captions={each.name: each.caption for each in readings if not each.fault},
    )


def _different(part: Rows) -> np.ndarray:
    """Return the rows without those of a sample that an earlier one is of; two tars may have a key in common."""
    fields = [name for name in part.index.table.dtype.names or () if name != "shard"]
    places = part.index.table[fields][part.rows].tolist()
    first: dict[tuple[str, Any], int] = {}
    for row, place in zip(part.rows.tolist(), places, strict=True):
        first.setdefault((part.index.name(row), place), row)
    return np.array(list(first.values()), dtype=np.int64)


def _buckets(part: Rows) -> tuple[tuple[BucketCount, ...], float]:
    """Return the training sizes of all samples, and the mean share of a picture that is cut away."""
    width_N, height_N = (part.index.table[name][part.rows].astype(np.int64) for name in ("width", "height"))
    table = part.source.bucket_table(part.index)
    bucket_N = table.nearest(width_N, height_N)
    enlarged_N = table.enlargement(bucket_N, width_N, height_N) > 1.0
    height_K, width_K = table.sizes_K2.T
    counts = [
        BucketCount(
            height=int(height_K[bucket]),
            width=int(width_K[bucket]),
            samples=int((bucket_N == bucket).sum()),
            enlarged=int(enlarged_N[bucket_N == bucket].sum()),
        )
        for bucket in np.unique(bucket_N).tolist()
    ]
    known = (width_N > 0) & (height_N > 0)
    wider = (width_N[known] * height_K[bucket_N[known]]) / (height_N[known] * width_K[bucket_N[known]])
    kept = np.minimum(wider, 1 / wider)
    cropped = float(1 - kept.mean()) if known.any() else 0.0
    return tuple(sorted(counts, key=lambda each: -each.samples)), cropped


def _readings(part: Rows, rows: np.ndarray, seed: int) -> Iterator[_Reading]:
    sizes_K2 = part.source.bucket_table(part.index).sizes_K2
    target = (int(sizes_K2[0, 0]), int(sizes_K2[0, 1]))
    for row in rows.tolist():
        name, digest, caption, is_rotated, fault = part.index.name(row), b"", "", False, ""
        try:
            raw = part.source.read(row)
            digest = _digest(raw)
            if raw.image is not None:
                decode(raw.image, target, max_pixels=part.source.max_pixels)
                is_rotated = _is_rotated(raw.image)
            generator = torch.Generator().manual_seed(sample_seed(seed, 0, row, "caption"))
            caption = part.source.captions_of(row)(raw, generator)
        except (UnreadableSampleError, OSError) as error:
            fault = str(error)
        yield _Reading(name=name, digest=digest, caption=caption, is_rotated=is_rotated, fault=fault)


def _digest(raw: RawSample) -> bytes:
    content = raw.image.tobytes() if isinstance(raw.image, np.ndarray) else raw.image or b""
    return hashlib.blake2b(content, digest_size=16).digest()


def _is_rotated(image: bytes | np.ndarray) -> bool:
    if isinstance(image, np.ndarray):
        return False
    return bool(Image.open(io.BytesIO(image)).getexif().get(ORIENTATION, 1) != 1)


def _twice(readings: list[_Reading]) -> tuple[tuple[str, ...], ...]:
    names = defaultdict(list)
    for each in readings:
        if each.digest:
            names[each.digest].append(each.name)
    return tuple(tuple(same) for same in names.values() if len(same) > 1)
