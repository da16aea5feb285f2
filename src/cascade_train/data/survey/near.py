"""Pictures that look alike: a perceptual hash of each, and every pair of hashes within a Hamming distance."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from PIL import Image

DISTANCE = 4
"""Bits of 64 by which the hashes of pictures that look alike differ at most."""

COLOUR_DISTANCE = 12.0
"""Mean difference of their small pictures at most, of 255: a picture and its negative in colour have one hash."""

_SIDE, _KEPT, _SMALL = 32, 8, 8
_FREQUENCY = np.cos(np.pi / _SIDE * np.outer(np.arange(_KEPT), np.arange(_SIDE) + 0.5))
"""The lowest frequencies of the cosine transform, (8, 32)."""


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
