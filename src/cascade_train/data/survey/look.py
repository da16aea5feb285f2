"""A survey of samples: sizes and shapes from the index, the rest from reading some of them."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cascade_train.batch import sample_seed
from cascade_train.data.buckets import PRESETS, BucketTable
from cascade_train.data.data_set import Rows
from cascade_train.data.decoding.decode import decode
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.data.survey.near import Look, group_alike, look_of

MUCH = 0.1
"""Share of a picture that counts as much to crop away."""


class BucketCount(NamedTuple):
    """A training size in pixels, its samples, and how many of them are smaller than it."""

    height: int
    width: int
    samples: int
    enlarged: int


class Cropping(NamedTuple):
    """The effect of a choice of `data.aspect_ratios` on the pictures of known size."""

    aspect_ratios: str  # as an override has it
    sizes: int  # training sizes that occur
    cropped: float  # mean share of a picture that is cropped away
    much: int  # samples that lose more than `MUCH`
    enlarged: int  # samples that are smaller than their size


class Text(NamedTuple):
    """A caption as in the first epoch, and its origin: a file, a key, and whether it was drawn."""

    caption: str
    origin: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Survey:
    """The properties of a set of samples."""

    samples: int  # of an epoch
    pictures: int  # different pictures among them: repeats count once
    width_N: np.ndarray  # of the pictures in pixels, upright; 0 where the header cannot be read
    height_N: np.ndarray  # the same
    buckets: tuple[BucketCount, ...]  # the training sizes that occur, most samples first
    shapes: tuple[Cropping, ...]  # the chosen ones first, then others
    read: int  # how many pictures were read and decoded
    unreadable: tuple[tuple[str, str], ...]  # name and reason of those that could not be
    rotated: tuple[str, ...]  # names of those that EXIF rotates
    twice: tuple[tuple[str, ...], ...]  # names of pictures with the same content, together
    near: tuple[tuple[str, ...], ...]  # names of pictures that look alike, the largest first
    texts: dict[str, Text]  # name -> caption of those that could be read

    @property
    def captions(self) -> dict[str, str]:
        """Name -> caption of the pictures that could be read."""
        return {name: text.caption for name, text in self.texts.items()}

    @property
    def cropped(self) -> float:
        """Mean share of a picture that is cropped away."""
        return self.shapes[0].cropped


def survey(part: Rows, *, read: int | None, seed: int) -> Survey:
    """Look at samples that are not a stream; `read` pictures are read and decoded, evenly spread, None = all.

    The seed is that of the first epoch's captions.
    """
    rows = _different(part)
    chosen = rows if read is None else rows[np.unique(np.linspace(0, len(rows) - 1, read).round().astype(np.int64))]
    unreadable, rotated, texts = list[tuple[str, str]](), list[str](), dict[str, Text]()
    same, looks = defaultdict[bytes, list[str]](list), dict[str, tuple[Look, int]]()
    height, width = part.source.bucket_table(part.index).sizes_K2[0].tolist()
    for row in chosen.tolist():
        name = part.index.name(row)
        try:
            raw = part.source.read(row)
            content = raw.image.tobytes() if isinstance(raw.image, np.ndarray) else raw.image or b""
            alone = same[hashlib.blake2b(content, digest_size=16).digest()]
            alone.append(name)
            if raw.image is not None:
                picture = decode(raw.image, (height, width), max_pixels=part.source.max_pixels)
                rotated += [name] if picture.rotated else []
                if len(alone) == 1:
                    looks[name] = look_of(picture.pixels), picture.size[0] * picture.size[1]
            generator = torch.Generator().manual_seed(sample_seed(seed, 0, row, "caption"))
            texts[name] = Text(*part.source.captions_of(row).traced(raw, generator))
        except (UnreadableSampleError, OSError) as error:
            unreadable.append((name, str(error)))
    width_N, height_N = _sizes(part, rows)
    return Survey(
        samples=len(part.rows),
        pictures=len(rows),
        width_N=width_N,
        height_N=height_N,
        buckets=_buckets(part),
        shapes=_shapes(part),
        read=len(chosen),
        unreadable=tuple(unreadable),
        rotated=tuple(rotated),
        twice=tuple(tuple(names) for names in same.values() if len(names) > 1),
        near=_near(looks),
        texts=texts,
    )


def _different(part: Rows) -> np.ndarray:
    """Return the first row of each sample; two tars may have a key in common."""
    table, rows = part.index.table[part.rows], part.rows
    names = [name for name in table.dtype.names or () if name != "shard"]
    _, shard_of = np.unique(part.index.shards, return_inverse=True)  # of the same name, they count as one
    columns = [*(table[name] for name in names), shard_of[table["shard"]], part.index.keys[rows]]
    order = np.lexsort(columns)  # stable: of equal rows the first one comes first
    equals_next = np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in columns])
    return np.sort(rows[order[np.r_[True, ~equals_next]]])


def _near(looks: dict[str, tuple[Look, int]]) -> tuple[tuple[str, ...], ...]:
    """Return the names of pictures that look alike, in groups, those of most pixels first."""
    names = list(looks)
    groups = group_alike([look for look, _ in looks.values()])
    return tuple(tuple(sorted((names[i] for i in group), key=lambda name: -looks[name][1])) for group in groups)


def _sizes(part: Rows, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return width and height of rows in pixels, (N,) int64 each, 0 = unknown."""
    width_N, height_N = (part.index.table[name][rows].astype(np.int64) for name in ("width", "height"))
    return width_N, height_N


def _buckets(part: Rows) -> tuple[BucketCount, ...]:
    sizes, table = _sizes(part, part.rows), part.source.bucket_table(part.index)
    bucket_N = table.nearest(*sizes)
    enlarged = Counter(bucket_N[table.enlargement(bucket_N, *sizes) > 1.0].tolist())
    counts = Counter(np.sort(bucket_N).tolist()).most_common()
    sizes_K2 = table.sizes_K2.tolist()
    return tuple(BucketCount(sizes_K2[k][0], sizes_K2[k][1], samples, enlarged[k]) for k, samples in counts)


def _shapes(part: Rows) -> tuple[Cropping, ...]:
    """Return the effect of the chosen aspect ratios, and of the presets."""
    width_N, height_N = _sizes(part, part.rows)
    known = (width_N > 0) & (height_N > 0)
    sizes, source = (width_N[known], height_N[known]), part.source
    found = [_shape(str(source.aspect_ratios or "null"), source.bucket_table(part.index), *sizes)]
    for name, ratios in {"null": None, **{preset: preset for preset in PRESETS}}.items():
        if name != found[0].aspect_ratios:
            try:
                found.append(_shape(name, source.buckets.table(source.image_size, ratios), *sizes))
            except ValueError:  # a ratio too extreme for so small a picture
                continue
    return tuple(found)


def _shape(name: str, table: BucketTable, width_N: np.ndarray, height_N: np.ndarray) -> Cropping:
    bucket_N = table.nearest(width_N, height_N)
    height_of, width_of = table.sizes_K2[bucket_N].T
    wider = (width_N * height_of) / np.maximum(height_N * width_of, 1)
    lost = 1 - np.minimum(wider, 1 / np.maximum(wider, 1e-9))
    return Cropping(
        aspect_ratios=name,
        sizes=len(np.unique(bucket_N)),
        cropped=float(lost.mean()) if len(lost) else 0.0,
        much=int((lost > MUCH).sum()),
        enlarged=int((table.enlargement(bucket_N, width_N, height_N) > 1.0).sum()),
    )
