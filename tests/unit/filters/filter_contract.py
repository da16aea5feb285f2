"""What every control filter must keep, whatever its map is. A test class per filter inherits from this.

The filters that the library brings are tested like those of a user: one class, one method that makes the filter.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cascade_train.filters.base import ControlFilter, transform_images

CPU = torch.device("cpu")


def pictures(count: int, height: int, width: int) -> Tensor:
    """Return pictures (B, 3, H, W) uint8: a red box on a dark gradient, each elsewhere."""
    image = np.linspace(0, 90, height * width, dtype=np.float32).reshape(1, 1, height, width)
    image = np.repeat(np.repeat(image, 3, axis=1), count, axis=0)
    for place in range(count):
        top, left = (place + 1) * height // 8, (place + 2) * width // 8
        image[place, :, top : top + (height + 1) // 2, left : left + (width + 1) // 2] = [[[250]], [[20]], [[60]]]
    return torch.from_numpy(image.astype(np.uint8))


def generators(*seeds: int) -> list[torch.Generator]:
    """Return generators as the workers give them, one for each picture."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def encode(image_BCHW: Tensor) -> Tensor:
    """Stand in for a stage's compressor: 16 channels, a latent for each 32 pixels begun."""
    mean_BCHW = torch.nn.functional.avg_pool2d(image_BCHW, 32, ceil_mode=True)
    return mean_BCHW.repeat(1, 6, 1, 1)[:, :16]


class ControlFilterContract:
    """Inherit, and return a filter from `make`; the hooks of a random filter say that it is one."""

    def make(self) -> ControlFilter:
        """Return a filter as its YAML makes it, or nearly."""
        raise NotImplementedError

    def again(self, node: dict[str, Any]) -> ControlFilter:
        """Return the filter that a node without its `_target_` makes; of nested components the tests make objects."""
        return type(self.make())(**node)

    def maps(self, image_BCHW: Tensor, *seeds: int) -> Tensor:
        """Return the maps of pictures, made by both halves."""
        return both_halves(self.make(), image_BCHW, *seeds)

    def test_the_filter_is_an_object_without_modules_until_it_is_built(self) -> None:
        assert isinstance(self.make(), ControlFilter)
        assert not any(isinstance(value, torch.nn.Module | Tensor) for value in vars(self.make()).values())

    def test_it_says_itself_in_plain_values_that_make_it_again(self) -> None:
        found = self.make()
        node = json.loads(json.dumps(found.node()))
        assert node.pop("_target_").rpartition(".")[2] == type(found).__name__
        assert self.again(node).node() == found.node()

    def test_the_workers_half_can_be_sent_to_another_process_after_the_filter_was_built(self) -> None:
        found = self.make()
        transform = found.sample_transform()
        image_BCHW = pictures(1, 64, 96)
        before = transform_images(transform, image_BCHW, generators(3))
        found.build(device=CPU, encode=encode)
        again = pickle.loads(pickle.dumps(transform))
        after = transform_images(again, image_BCHW, generators(3))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(name.startswith("control_") for name in before)

    @pytest.mark.parametrize("size", [(64, 64), (64, 96), (50, 71), (1, 1), (1, 300), (7, 3)])
    def test_pictures_of_any_size_have_finite_maps_of_the_channels_it_says(self, size: tuple[int, int]) -> None:
        image_BCHW = pictures(2, *size)
        map_BCHW = self.maps(image_BCHW, 0, 1)
        assert map_BCHW.shape[:2] == (2, self.make().channels)
        assert map_BCHW.dtype == torch.float32
        assert map_BCHW.isfinite().all()
        assert not map_BCHW.requires_grad

    def test_a_map_has_structure_where_the_picture_has(self) -> None:
        assert self.maps(pictures(2, 64, 96), 0, 1).std() > 0.01

    def test_the_map_of_a_sample_depends_on_its_own_picture_and_generator_alone(self) -> None:
        image_BCHW = pictures(3, 64, 96)
        together = self.maps(image_BCHW, 5, 6, 7)
        for place, seed in enumerate((5, 6, 7)):
            alone = self.maps(image_BCHW[place : place + 1], seed)
            torch.testing.assert_close(alone[0], together[place], rtol=1e-5, atol=1e-5)

    def test_equal_seeds_give_equal_maps_and_others_differ_only_where_the_filter_says_so(self) -> None:
        first, again, *others = self.maps(pictures(1, 64, 96).repeat(21, 1, 1, 1), 0, *range(20))
        torch.testing.assert_close(first, again, rtol=1e-5, atol=1e-5)
        differ = [not torch.allclose(first, other, rtol=1e-5, atol=1e-5) for other in others]
        assert any(differ) != self.make().deterministic

    def test_the_picture_is_left_as_it_was(self) -> None:
        image_BCHW = pictures(2, 64, 96)
        self.maps(image_BCHW, 0, 1)
        assert torch.equal(image_BCHW, pictures(2, 64, 96))

    def test_people_see_colours_with_and_without_the_picture(self) -> None:
        image_BCHW = pictures(2, 64, 96)
        map_BCHW = self.maps(image_BCHW, 0, 1)
        for known in (None, image_BCHW.float() / 255):
            shown_BCHW = self.make().preview(map_BCHW, known)
            assert shown_BCHW.shape[:2] == (2, 3)
            assert shown_BCHW.min() >= 0.0
            assert shown_BCHW.max() <= 1.0


class OfFiles:
    """Inherit first where a filter is made of files, which the module's fixture `files` writes."""

    @pytest.fixture(autouse=True)
    def _files(self, files: Any) -> None:
        self.files = files


def both_halves(found: ControlFilter, image_BCHW: Tensor, *seeds: int) -> Tensor:
    """Return the maps that a filter makes of pictures (B, 3, H, W) uint8."""
    made: Mapping[str, Tensor] = transform_images(found.sample_transform(), image_BCHW, generators(*seeds))
    return found.build(device=CPU, encode=encode)(image_BCHW.float() / 255, made)
