"""Pictures that look alike are found, and no others; the search is exact."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from cascade_train.data.survey.look import group_alike, look_of, near_pairs


def scene(seed: int, side: int = 96) -> np.ndarray:
    """Return smooth colours, (side, side, 3) uint8."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("distance", [0, 3, 4, 7])
def test_every_pair_within_the_distance_is_found_and_no_other(distance: int) -> None:
    generator = np.random.default_rng(1)
    hashes = generator.integers(0, 2**64, 300, dtype=np.uint64)
    flips = [sum(1 << int(bit) for bit in generator.choice(64, count, replace=False)) for count in range(10)]
    hashes = np.concatenate([hashes, *(hashes[:40] ^ np.uint64(flip) for flip in flips)])
    apart = np.bitwise_count(hashes[:, None] ^ hashes[None])
    expected = np.argwhere(np.triu(apart <= distance, k=1))
    assert len(expected) >= 40
    assert np.array_equal(near_pairs(hashes, distance), expected)


def test_a_picture_resized_recompressed_or_brightened_looks_alike() -> None:
    pictures = [scene(seed) for seed in range(12)]
    small = np.asarray(Image.fromarray(pictures[3]).resize((70, 64)))
    brighter = np.clip(pictures[5].astype(int) + 6, 0, 255).astype(np.uint8)
    noisy = np.clip(pictures[7] + np.random.default_rng(0).normal(0, 4, pictures[7].shape), 0, 255).astype(np.uint8)
    looks = [look_of(picture) for picture in [*pictures, small, brighter, noisy, pictures[7]]]
    assert group_alike(looks) == [[3, 12], [5, 13], [7, 14, 15]]
    assert group_alike([]) == []
    assert group_alike(looks[:1]) == []


def test_a_mirrored_picture_and_one_in_other_colours_do_not() -> None:
    picture = scene(2)
    others = [picture[:, ::-1], np.roll(picture, 1, axis=2), 255 - picture, np.full_like(picture, 255)]
    assert group_alike([look_of(each) for each in [picture, *others]]) == []


def test_of_a_large_picture_only_every_nth_pixel_is_looked_at() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (1024, 1536, 3), dtype=np.uint8)
    found, wanted = look_of(picture), look_of(picture[::4, ::4])
    assert found.hash == wanted.hash
    assert np.array_equal(found.colours, wanted.colours)
