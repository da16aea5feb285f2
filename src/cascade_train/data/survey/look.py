"""A survey of samples: sizes and shapes from the index, the rest, as which look alike, from reading some of them."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from cascade_train.batch import sample_seed
from cascade_train.data.buckets import PRESETS, BucketTable
from cascade_train.data.data_set import Rows
from cascade_train.data.decoding.decode import decode
from cascade_train.data.decoding.framing import gray_mask
from cascade_train.data.index.rows import Index
from cascade_train.data.sample import UnreadableSampleError

MUCH = 0.1
"""Share of a picture that counts as much to crop away."""

DISTANCE = 4
"""Bits of 64 by which the hashes of pictures that look alike differ at most."""

COLOUR_DISTANCE = 12.0
"""Mean difference of their small pictures at most, of 255: a picture and its negative in colour have one hash."""

_SIDE, _KEPT, _SMALL = 32, 8, 8
_FREQUENCY = np.cos(np.pi / _SIDE * np.outer(np.arange(_KEPT), np.arange(_SIDE) + 0.5))
"""The lowest frequencies of the cosine transform, (8, 32)."""


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
    shared: dict[str, str]  # numbered name -> the name of several samples, as `Index.name` has it

    @property
    def captions(self) -> dict[str, str]:
        """Name -> caption of the pictures that could be read."""
        return {name: text.caption for name, text in self.texts.items()}


def survey(part: Rows, *, read: int | None, seed: int) -> Survey:
    """Look at samples that are not a stream; `read` pictures are read and decoded, evenly spread, None = all.

    The seed is that of the first epoch's captions.
    """
    rows = _different(part)
    chosen = rows if read is None else rows[np.unique(np.linspace(0, len(rows) - 1, read).round().astype(np.int64))]
    name_of, shared = _unique_names(part.index, rows, chosen)
    unreadable, rotated, texts = list[tuple[str, str]](), list[str](), dict[str, Text]()
    same, looks = defaultdict[bytes, dict[object, str]](dict), dict[str, tuple[Look, int]]()  # names by picture
    height, width = part.source.bucket_table(part.index).sizes_K2[0].tolist()
    for row in chosen.tolist():
        name, pictures = name_of[row], part.index.split_by
        try:
            raw = part.source.read(row)
            if raw.image is not None:
                content = raw.image.tobytes() if isinstance(raw.image, np.ndarray) else raw.image
                alike = same[hashlib.blake2b(content, digest_size=16).digest()]
                is_first = not alike
                shard = int(part.index.table["shard"][row])  # rows of a table may have one picture, two tars one name
                alike.setdefault((shard, shared.get(name, name)) if pictures is None else pictures[row], name)
                picture = decode(raw.image, (height, width), max_pixels=part.source.max_pixels)
                rotated += [name] if picture.rotated else []
                if raw.mask is not None:
                    gray_mask(raw.mask, picture.size, (height, width), max_pixels=part.source.max_pixels)
                if is_first:
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
        twice=tuple(tuple(names.values()) for names in same.values() if len(names) > 1),
        near=_near(looks),
        texts=texts,
        shared=shared,
    )


def _different(part: Rows) -> np.ndarray:
    """Return the first row of each sample; two tars may have a key in common."""
    table, rows = part.index.table[part.rows], part.rows
    names = [name for name in table.dtype.names or () if name != "shard"]
    columns = [*(table[name] for name in names), *_shards_and_keys(part.index, rows)]
    columns.append(part.index.content[rows])  # tars of several folders may have one name
    order = np.lexsort(columns)  # stable: of equal rows the first one comes first
    equals_next = np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in columns])
    return np.sort(rows[order[np.r_[True, ~equals_next]]])


def _shards_and_keys(index: Index, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a number of each row's shard, equal for shards of one name, and its key."""
    _, shard_of = np.unique(index.shards, return_inverse=True)
    return shard_of[index.table["shard"][rows]], index.keys[rows]


def _unique_names(index: Index, rows: np.ndarray, chosen: np.ndarray) -> tuple[dict[int, str], dict[str, str]]:
    """Return a name of each chosen row, numbered where several rows have one; and `Index.name` of numbered ones."""
    columns = _shards_and_keys(index, rows)
    order = np.lexsort(columns)
    equals_next = np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in columns])
    comes_again = np.zeros(len(rows), dtype=bool)
    comes_again[order[1:]] = equals_next
    comes_again[order[:-1]] |= equals_next
    rows = rows[comes_again | np.isin(rows, chosen)]
    names = [index.name(row) for row in rows.tolist()]
    number_of, counts, unique, shared = Counter[str](), Counter(names), dict[int, str](), dict[str, str]()
    for row, name in zip(rows.tolist(), names, strict=True):
        number_of[name] += 1
        unique[row] = name if counts[name] == 1 else f"{name} #{number_of[name]}"
        shared |= {unique[row]: name} if counts[name] > 1 else {}
    return unique, shared


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


@dataclass(frozen=True, eq=False, kw_only=True)
class Look:
    """How a picture looks, in 200 bytes."""

    hash: int  # 64 bits: which of the lowest 8 x 8 frequencies of its grey picture lie above their median
    colours: np.ndarray  # (192,) uint8, the picture at 8 x 8 pixels


def look_of(pixels: np.ndarray) -> Look:
    """Return how (H, W, 3) uint8 pixels look, whatever their size (pHash: Zauner 2010, section 3.2.1)."""
    step = max(1, min(pixels.shape[:2]) // (8 * _SIDE))  # 64 pixels for each that is left are enough
    picture = Image.fromarray(np.ascontiguousarray(pixels[::step, ::step]))
    small = np.asarray(picture.resize((_SIDE, _SIDE), Image.Resampling.BOX))
    frequencies = (_FREQUENCY @ small.mean(axis=2) @ _FREQUENCY.T).ravel()
    above = frequencies > np.median(frequencies[1:])  # the first is the brightness
    above[0] = False
    blocks = small.reshape(_SMALL, _SIDE // _SMALL, _SMALL, _SIDE // _SMALL, 3)
    colours = blocks.mean(axis=(1, 3)).round().astype(np.uint8).ravel()
    return Look(hash=int.from_bytes(np.packbits(above).tobytes(), "big"), colours=colours)


def group_alike(looks: list[Look], *, distance: int = DISTANCE) -> list[list[int]]:
    """Return the positions of pictures that look alike, in groups of two and more; a group may be a chain of pairs.

    Those of one hash are compared in the order of their brightness, each with the next, and stand for each other.
    """
    if not looks:
        return []
    hash_N = np.array([look.hash for look in looks], dtype=np.uint64)
    colours_NT = np.stack([look.colours for look in looks])
    order = np.lexsort((colours_NT.mean(axis=1), hash_N))
    links = np.stack([order[:-1], order[1:]], axis=1)
    links = links[(hash_N[links[:, 0]] == hash_N[links[:, 1]]) & _close(colours_NT, links)]
    first_N = np.ones(len(looks), dtype=bool)
    first_N[links[:, 1]] = False
    firsts = np.flatnonzero(first_N)
    pairs = firsts[near_pairs(hash_N[firsts], distance)]
    return _groups(np.concatenate([links, pairs[_close(colours_NT, pairs)]]))


def near_pairs(hash_N: np.ndarray, distance: int) -> np.ndarray:
    """Return all pairs (i, j) of 64-bit hashes that differ in at most `distance` bits, (M, 2) int64 with i < j.

    Exact: of `distance` + 2 blocks of bits, two such hashes have at least two in common, so that only those that share
    a pair of blocks are compared (multi-index hashing: Norouzi, Punjani and Fleet 2012).
    """
    cuts = np.linspace(0, 64, distance + 3).astype(int)
    blocks = [(hash_N >> np.uint64(a)) & np.uint64((1 << int(b - a)) - 1) for a, b in zip(cuts, cuts[1:], strict=False)]
    found = [np.zeros((0, 2), dtype=np.int64)]
    for one, other in combinations(range(len(blocks)), 2):
        width = np.uint64(cuts[other + 1] - cuts[other])
        found += _pairs_of_equal((blocks[one] << width) | blocks[other], hash_N, distance)
    return np.unique(np.concatenate(found), axis=0)


def _pairs_of_equal(key_N: np.ndarray, hash_N: np.ndarray, distance: int) -> list[np.ndarray]:
    """Return the pairs of one key whose hashes are near, compared with the next, the next but one, ... of that key."""
    order = np.argsort(key_N, kind="stable")
    key_N, hash_N = key_N[order], hash_N[order]
    found, here, step = [], np.arange(len(order)), 1
    while len(here := here[here + step < len(order)]):
        here = here[key_N[here] == key_N[here + step]]
        near = here[np.bitwise_count(hash_N[here] ^ hash_N[here + step]) <= distance]
        found.append(np.sort(np.stack([order[near], order[near + step]], axis=1), axis=1))
        step += 1
    return found


def _close(colours_NT: np.ndarray, pairs_M2: np.ndarray) -> np.ndarray:
    """Return which pairs have about the same colours, (M,) bool."""
    one, other = (colours_NT[pairs_M2[:, side]].astype(np.int16) for side in (0, 1))
    return np.abs(one - other).mean(axis=1) <= COLOUR_DISTANCE


def _groups(pairs_M2: np.ndarray) -> list[list[int]]:
    parent: dict[int, int] = {}

    def root(node: int) -> int:
        while parent.setdefault(node, node) != node:
            parent[node] = node = parent[parent[node]]
        return node

    for one, other in pairs_M2.tolist():
        parent[max(root(one), root(other))] = min(root(one), root(other))
    groups = defaultdict(list)
    for node in sorted(parent):
        groups[root(node)].append(node)
    return list(groups.values())
