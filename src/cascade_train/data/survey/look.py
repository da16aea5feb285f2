"""A survey of samples: sizes and shapes from the index, the rest from reading some of them."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from cascade_train.batch import sample_seed
from cascade_train.data.buckets import PRESETS, BucketTable
from cascade_train.data.data_set import Rows
from cascade_train.data.decoding.decode import decode
from cascade_train.data.decoding.framing import gray_mask
from cascade_train.data.index.rows import Index
from cascade_train.data.sample import UnreadableSampleError

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
    """The properties of a set of samples. What was found in some is keyed by their rows of the index."""

    samples: int  # of an epoch
    pictures: int  # different pictures among them: repeats count once
    width_N: np.ndarray  # of the pictures in pixels, upright; 0 where the header cannot be read
    height_N: np.ndarray  # the same
    buckets: tuple[BucketCount, ...]  # the training sizes that occur, most samples first
    shapes: tuple[Cropping, ...]  # the chosen ones first, then others
    names: dict[int, str]  # of those that were read and decoded
    namesakes: dict[int, int]  # how many samples have that name
    unreadable: dict[int, str] = field(default_factory=dict)  # and why
    rotated: list[int] = field(default_factory=list)  # by an orientation tag
    converted: list[int] = field(default_factory=list)  # from a colour profile to sRGB
    twice: list[list[int]] = field(default_factory=list)  # pictures of the same content, together
    texts: dict[int, Text] = field(default_factory=dict)  # captions of those that could be read

    @property
    def captions(self) -> list[str]:
        """The captions that could be read."""
        return [text.caption for text in self.texts.values()]


def survey(part: Rows, *, read: int | None, seed: int) -> Survey:
    """Look at samples that are not a stream; `read` pictures are read and decoded, evenly spread, None = all.

    The seed is that of the first epoch's captions.
    """
    rows = _different(part)
    chosen = np.arange(len(rows))
    chosen = chosen if read is None else np.unique(np.linspace(0, len(rows) - 1, read).round().astype(np.int64))
    namesakes_N = _namesakes(part.index, rows)
    width_N, height_N = _sizes(part, rows)
    result = Survey(
        samples=len(part.rows),
        pictures=len(rows),
        width_N=width_N,
        height_N=height_N,
        buckets=_buckets(part),
        shapes=_shapes(part),
        names={row: part.index.name(row) for row in rows[chosen].tolist()},
        namesakes=dict(zip(rows[chosen].tolist(), namesakes_N[chosen].tolist(), strict=True)),
    )
    same: dict[bytes, dict[object, int]] = defaultdict(dict)  # the first row of each picture, by content
    for row in result.names:
        try:
            _look_at(part, row, seed, result, same)
        except (UnreadableSampleError, OSError) as error:
            result.unreadable[row] = str(error)
    result.twice.extend(list(pictures.values()) for pictures in same.values() if len(pictures) > 1)
    return result


def _look_at(part: Rows, row: int, seed: int, result: Survey, same: dict[bytes, dict[object, int]]) -> None:
    raw, pictures = part.source.read(row), part.index.split_by
    target = part.source.bucket_table(part.index).sizes_K2[0].tolist()
    if raw.image is not None:
        content = raw.image.tobytes() if isinstance(raw.image, np.ndarray) else raw.image
        of_one_name = (
            int(part.index.table["shard"][row]),
            part.index.keys[row],
        )  # rows of a table may have one picture
        identity = of_one_name if pictures is None else pictures[row]
        same[hashlib.blake2b(content, digest_size=16).digest()].setdefault(identity, row)
        picture = decode(raw.image, target, max_pixels=part.source.max_pixels)
        result.rotated.extend([row] * picture.rotated)
        result.converted.extend([row] * picture.converted)
        if raw.mask is not None:
            gray_mask(raw.mask, picture.size, target, max_pixels=part.source.max_pixels)
    generator = torch.Generator().manual_seed(sample_seed(seed, 0, row, "caption"))
    result.texts[row] = Text(*part.source.captions_of(row).traced(raw, generator))


def _different(part: Rows) -> np.ndarray:
    """The first row of each sample; two tars may have a key in common."""
    table, rows = part.index.table[part.rows], part.rows
    columns = [table[name] for name in table.dtype.names or () if name != "shard"]
    columns += [
        *_shards_and_keys(part.index, rows),
        part.index.content[rows],
    ]  # tars of several folders may have a name
    order, equals_next = _neighbours(columns)
    return np.sort(rows[order[np.r_[True, ~equals_next]]])


def _namesakes(index: Index, rows: np.ndarray) -> np.ndarray:
    """How many of the rows have the name of each, (N,) int64."""
    order, equals_next = _neighbours(_shards_and_keys(index, rows))
    group_N = np.zeros(len(rows), dtype=np.int64)
    group_N[order[1:]] = np.cumsum(~equals_next)
    return np.bincount(group_N)[group_N]


def _neighbours(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A stable order by these columns, (N,), and where a row in it equals the next one, (N - 1,) bool."""
    order = np.lexsort(columns)
    return order, np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in columns])


def _shards_and_keys(index: Index, rows: np.ndarray) -> list[np.ndarray]:
    """A number of each row's shard, equal for shards of one name, and its key."""
    _, shard_of = np.unique(index.shards, return_inverse=True)
    return [shard_of[index.table["shard"][rows]], index.keys[rows]]


def _sizes(part: Rows, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Width and height of rows in pixels, (N,) int64 each, 0 = unknown."""
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
    """The effect of the chosen aspect ratios, and of the presets."""
    width_N, height_N = _sizes(part, part.rows)
    known = (width_N > 0) & (height_N > 0)
    sizes, source = (width_N[known], height_N[known]), part.source
    shapes = [_shape(str(source.aspect_ratios or "null"), source.bucket_table(part.index), *sizes)]
    for name, ratios in {"null": None, **{preset: preset for preset in PRESETS}}.items():
        if name != shapes[0].aspect_ratios:
            try:
                shapes.append(_shape(name, source.buckets.table(source.image_size, ratios), *sizes))
            except ValueError:  # a ratio too extreme for so small a picture
                continue
    return tuple(shapes)


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
