"""A user's network, stored as ONNX, makes the map in the data workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onnx import TensorProto, helper

from cascade_train.errors import ConfigError
from cascade_train.filters.network import ONNX_NETWORK, OnnxFilter
from cascade_train.filters.parts.requirements import open_session
from tests.unit.filters import onnx_files
from tests.unit.filters.filter_contract import ControlFilterContract, both_halves, pictures


def network(weights: str, **options: object) -> OnnxFilter:
    defaults = {"channels": 1, "resize": None, "mean": [0.0] * 3, "std": [1.0] * 3, "output": None, "scaling": "none"}
    return OnnxFilter(weights=weights, **{**defaults, **options})


@pytest.fixture(scope="module")
def two_maps(tmp_path_factory: pytest.TempPathFactory) -> str:
    return onnx_files.two_maps(tmp_path_factory.mktemp("onnx") / "two.onnx")


class TestDepth(ControlFilterContract):
    @pytest.fixture(autouse=True)
    def _weights(self, two_maps: str) -> None:
        self.weights = two_maps

    def make(self) -> OnnxFilter:
        options = {"resize": 24, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "scaling": "picture"}
        return network(self.weights, **options)


class TestHeatMaps(ControlFilterContract):
    @pytest.fixture(autouse=True)
    def _weights(self, two_maps: str) -> None:
        self.weights = two_maps

    def make(self) -> OnnxFilter:
        return network(self.weights, resize=32, channels=2, output="colours")


def test_the_map_is_the_network_s_output_at_the_size_of_the_picture(two_maps: str) -> None:
    image_BCHW = pictures(1, 8, 12).repeat_interleave(2, 2).repeat_interleave(2, 3)
    map_BCHW = both_halves(network(two_maps), image_BCHW, 0)
    assert map_BCHW.shape == (1, 1, 16, 24)
    grey_HW = image_BCHW.float().mean(dim=1)[0] / 255
    assert (map_BCHW[0, 0] - grey_HW).abs().mean() < 0.05
    torch.testing.assert_close(map_BCHW.mean(), grey_HW.mean(), rtol=0.02, atol=0)


def test_pictures_are_normalised_before_and_maps_scaled_after(two_maps: str) -> None:
    image_BCHW = pictures(1, 16, 16)
    plain = both_halves(network(two_maps), image_BCHW, 0)
    shifted = both_halves(network(two_maps, mean=[0.5] * 3, std=[0.25] * 3), image_BCHW, 0)
    torch.testing.assert_close(shifted, (plain - 0.5) / 0.25, rtol=1e-4, atol=1e-5)
    transform = network(two_maps, scaling="picture").sample_transform()
    made = transform(image_BCHW[0].numpy(), torch.Generator())["control_map"]
    assert (made.min(), made.max()) == (0.0, 1.0)


def test_a_flat_map_is_scaled_to_zero(two_maps: str) -> None:
    flat = torch.full((1, 3, 8, 8), 90, dtype=torch.uint8)
    assert both_halves(network(two_maps, scaling="picture"), flat, 0).abs().max() == 0.0


def test_another_output_is_chosen_by_its_name(two_maps: str) -> None:
    image_BCHW = pictures(1, 16, 16)
    colours = both_halves(network(two_maps, output="colours", channels=3), image_BCHW, 0)
    grey = both_halves(network(two_maps), image_BCHW, 0)
    torch.testing.assert_close(colours.mean(dim=1, keepdim=True), grey)


def test_an_output_that_is_not_there_is_refused_with_those_that_are(two_maps: str) -> None:
    with pytest.raises(ConfigError, match=r"task.filter.output=depth: the network's outputs are grey, colours"):
        network(two_maps, output="depth").sample_transform()


def test_more_channels_than_the_network_has_are_refused(two_maps: str) -> None:
    with pytest.raises(ConfigError, match=r"shape \(1, 1, 4, 4\), which holds no maps of 2 channels"):
        both_halves(network(two_maps, channels=2), pictures(1, 8, 8), 0)


def test_a_network_of_one_size_is_refused_any_other(tmp_path: Path) -> None:
    path = onnx_files.two_maps(tmp_path / "fixed.onnx", size=64)
    assert both_halves(network(path, resize=64), pictures(1, 50, 70), 0).shape == (1, 1, 50, 70)
    with pytest.raises(ConfigError, match=r"task.filter.resize=32: this network takes pictures of \[64, 64\] px alone"):
        network(path, resize=32).sample_transform()


def test_a_network_of_two_inputs_is_refused(tmp_path: Path) -> None:
    inputs = [onnx_files.picture(1, 3, 8, 8), helper.make_tensor_value_info("time", TensorProto.FLOAT, [1])]
    nodes = [helper.make_node("Add", ["image", "time"], ["map"])]
    path = onnx_files.save(tmp_path / "two.onnx", nodes, inputs, ["map"], {})
    with pytest.raises(ConfigError, match=r"takes image tensor\(float\), time tensor\(float\); it must take one fp32"):
        network(path).sample_transform()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("not a network")
    with pytest.raises(ConfigError, match=r"text.onnx: onnxruntime cannot run this file"):
        network(str(tmp_path / "text.onnx")).sample_transform()


def test_a_network_that_is_not_there_is_described() -> None:
    with pytest.raises(ConfigError, match=r"weights=no.onnx: no such file.* Apache-2.0"):
        network("no.onnx").sample_transform()


def test_a_process_opens_a_network_once(two_maps: str) -> None:
    assert open_session(Path(two_maps), ONNX_NETWORK) is open_session(Path(two_maps), ONNX_NETWORK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, "channels=0 must be at least 1: the number of channels that the network makes"),
        ({"resize": 0}, "resize=0 must be at least 1: the side in pixels of a copy"),
        ({"std": [1.0, 1.0, 0.0]}, "give three numbers each, for red, green and blue"),
        ({"mean": [0.5]}, "give three numbers each, for red, green and blue"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network("any.onnx", **options)
