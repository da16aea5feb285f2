"""What every filter shares: the two halves, what people see of a map, and the node that its weights remember."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cascade_train.errors import ConfigError
from cascade_train.filters.base import (
    ControlFilter,
    ImageFilter,
    float_map,
    map_maker,
    resize_map,
    to_colours,
    transform_images,
)


class Brightness(ImageFilter):
    channels = 1

    def __init__(self, *, gain: float) -> None:
        self.gain = gain
        self._unseen = 1

    def apply(self, image: np.ndarray, generator: torch.Generator) -> np.ndarray:
        return image.max(axis=0, keepdims=True)


class Transposed(Brightness):
    def apply(self, image: np.ndarray, generator: torch.Generator) -> np.ndarray:
        return image.transpose(1, 2, 0)


class Silent(Brightness):
    def apply(self, image: np.ndarray, generator: torch.Generator) -> Any:
        return None


class OnDeviceAlone(ControlFilter):
    channels = 3

    def build(self, *, device: torch.device, encode):
        return lambda image_BCHW, made: encode(image_BCHW)


def images(count: int = 2) -> Tensor:
    return torch.randint(0, 256, (count, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def generators(count: int = 2) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def test_a_map_of_bytes_arrives_as_a_share_of_255() -> None:
    made = transform_images(Brightness(gain=1.0).sample_transform(), images(), generators())
    assert made["control_map"].dtype == torch.uint8
    map_BCHW = Brightness(gain=1.0).build(device=torch.device("cpu"), encode=torch.neg)(images() / 255, made)
    assert torch.equal(map_BCHW, images().amax(dim=1, keepdim=True) / 255)


def test_a_map_of_floats_arrives_as_it_is() -> None:
    made = {"control_map": torch.tensor([[[[-2.0, 300.0]]]])}
    assert torch.equal(float_map(images(1), made), made["control_map"])


@pytest.mark.parametrize(("kind", "found"), [(Transposed, r"\(5, 7, 3\) and uint8"), (Silent, r"\(\) and object")])
def test_a_map_of_another_form_is_refused_by_name(kind: type[Brightness], found: str) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__} made a map of shape {found}; it must be \(1, h"):
        transform_images(kind(gain=1.0).sample_transform(), images(), generators())


@pytest.mark.parametrize(
    ("made", "found"),
    [
        pytest.param(lambda image_BCHW: image_BCHW[:, :2], r"\(2, 2, 5, 7\)", id="other channels"),
        pytest.param(lambda image_BCHW: image_BCHW[:1], r"\(1, 3, 5, 7\)", id="one map for all"),
        pytest.param(lambda image_BCHW: image_BCHW[0], r"\(3, 5, 7\)", id="no batch"),
        pytest.param(lambda image_BCHW: None, "NoneType", id="nothing"),
    ],
)
def test_maps_of_the_device_of_another_form_are_refused_by_name(made: Callable[[Tensor], Any], found: str) -> None:
    make = map_maker(OnDeviceAlone(), device=torch.device("cpu"), encode=made)
    with pytest.raises(ConfigError, match=rf"OnDeviceAlone made maps of {found}; .* \(2, 3\) x height x width"):
        make(images() / 255, {})


def test_maps_of_the_device_pass_as_they_are() -> None:
    make = map_maker(OnDeviceAlone(), device=torch.device("cpu"), encode=torch.neg)
    assert torch.equal(make(images() / 255, {}), -(images() / 255))


def test_a_filter_without_the_workers_half_makes_nothing_there() -> None:
    found = OnDeviceAlone()
    assert transform_images(found.sample_transform(), images(), generators()) == {}
    map_of = found.build(device=torch.device("cpu"), encode=lambda image_BCHW: image_BCHW[..., :1])
    assert map_of(images() / 255, {}).shape == (2, 3, 5, 1)


def test_the_node_names_the_class_and_its_arguments() -> None:
    node: Mapping[str, object] = Brightness(gain=2.0).node()
    assert node["_target_"].endswith("test_base.Brightness")
    assert {key: value for key, value in node.items() if key != "_target_"} == {"gain": 2.0}


def test_resizing_keeps_what_has_the_size() -> None:
    map_BCHW = torch.rand(1, 2, 3, 4)
    assert resize_map(map_BCHW, (3, 4)) is map_BCHW
    assert resize_map(map_BCHW, (1, 9)).shape == (1, 2, 1, 9)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 16, 512])
def test_people_see_colours_of_any_map(channels: int) -> None:
    shown_BCHW = to_colours(4 * torch.randn(2, channels, 3, 5, generator=torch.Generator().manual_seed(channels)))
    assert shown_BCHW.shape == (2, 3, 3, 5)
    assert shown_BCHW.min() >= 0.0
    assert shown_BCHW.max() <= 1.0
    assert shown_BCHW.std() > 0.1


def test_red_green_and_blue_are_shown_as_they_are() -> None:
    map_BCHW = torch.rand(1, 4, 3, 5)
    assert torch.equal(to_colours(map_BCHW), map_BCHW[:, :3])
    assert torch.equal(to_colours(map_BCHW[:, :1]), map_BCHW[:, :1].repeat(1, 3, 1, 1))
    assert to_colours(torch.zeros(1, 16, 1, 1)).max() == 0.0
