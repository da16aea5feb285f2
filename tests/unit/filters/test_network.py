"""A user's network makes the maps: of torch on the device, stored as ONNX in the data workers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlFilter
from cascade_train.filters.network import NetworkFilter, OnnxFilter, load_exported
from tests.unit.filters import onnx_files
from tests.unit.filters.filter_contract import CPU, ControlFilterContract, OfFiles, both_halves, encode, pictures


class Depth(nn.Module):
    """Means over patches, with dropout that must not act."""

    def __init__(self, *, gain: float = 1.0, returns: str = "map") -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))
        self.returns = returns

    def forward(self, image_BCHW: Tensor) -> object:
        grey_BHW = nn.functional.dropout(image_BCHW.mean(dim=1), 0.5, self.training) * self.gain
        return {"map": grey_BHW, "mapping": {"depth": grey_BHW}, "nothing": [grey_BHW]}[self.returns]


def network(**options: object) -> NetworkFilter:
    defaults: dict[str, object] = {"network": partial(Depth), "weights": None, "channels": 1, "resize": None}
    defaults |= {"mean": [0.0] * 3, "std": [1.0] * 3, "output": None, "scaling": "none"}
    return NetworkFilter(**{**defaults, **options})


class TestNetwork(ControlFilterContract):
    def make(self) -> NetworkFilter:
        return network(resize=16, scaling="picture")

    def again(self, node: dict[str, object]) -> ControlFilter:
        made = node.pop("network")
        assert made.pop("_target_").endswith("Depth")
        assert made.pop("_partial_") is True
        return network(network=partial(Depth, **made), **node)


def test_the_network_is_made_on_the_device_frozen_and_in_eval_mode() -> None:
    image_BCHW = pictures(2, 8, 12)
    found = both_halves(network(network=partial(Depth, gain=3.0)), image_BCHW, 0, 1)
    torch.testing.assert_close(found, 3 * image_BCHW.float().mean(dim=1, keepdim=True) / 255)


def test_its_weights_are_loaded(tmp_path: Path) -> None:
    save_file({"gain": torch.tensor(5.0)}, tmp_path / "depth.safetensors")
    found = both_halves(network(weights=str(tmp_path / "depth.safetensors")), pictures(1, 8, 8), 0)
    torch.testing.assert_close(found, 5 * both_halves(network(), pictures(1, 8, 8), 0))


def test_a_network_that_returns_several_things_is_asked_for_one() -> None:
    found = network(network=partial(Depth, returns="mapping"), output="depth")
    assert both_halves(found, pictures(1, 8, 8), 0).shape == (1, 1, 8, 8)
    for returns, output in (("mapping", None), ("mapping", "edges"), ("nothing", "depth")):
        with pytest.raises(ConfigError, match=rf"output={output}: names no tensor in what the network returns, "):
            both_halves(network(network=partial(Depth, returns=returns), output=output), pictures(1, 8, 8), 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where it exports
def test_an_exported_network_is_read(tmp_path: Path) -> None:
    free = torch.export.Dim.AUTO
    program = torch.export.export(
        nn.Conv2d(3, 2, 1), (torch.zeros(2, 3, 8, 8),), dynamic_shapes={"input": {0: free, 2: free, 3: free}}
    )
    torch.export.save(program, tmp_path / "depth.pt2")
    found = network(network=partial(load_exported, path=str(tmp_path / "depth.pt2")), channels=2)
    assert both_halves(found, pictures(3, 12, 20), 0, 1, 2).shape == (3, 2, 12, 20)
    assert found.node()["network"]["_target_"] == "cascade_train.filters.network.load_exported"


def test_a_file_that_torch_did_not_export_is_refused(tmp_path: Path) -> None:
    (tmp_path / "depth.pt2").write_text("not a network")
    found = network(network=partial(load_exported, path=str(tmp_path / "depth.pt2")))
    with pytest.raises(ConfigError, match=r"depth.pt2: torch.export cannot read this file"):
        found.build(device=CPU, encode=encode)


def stored(weights: str, **options: object) -> OnnxFilter:
    defaults = {"channels": 1, "resize": None, "mean": [0.0] * 3, "std": [1.0] * 3, "output": None, "scaling": "none"}
    return OnnxFilter(weights=weights, **{**defaults, **options})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    return onnx_files.two_maps(tmp_path_factory.mktemp("onnx") / "two.onnx")


class TestDepth(OfFiles, ControlFilterContract):
    def make(self) -> OnnxFilter:
        options = {"resize": 24, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "scaling": "picture"}
        return stored(self.files, **options)


class TestHeatMaps(OfFiles, ControlFilterContract):
    def make(self) -> OnnxFilter:
        return stored(self.files, resize=32, channels=2, output="colours")


def test_the_map_is_the_network_s_output_at_the_size_of_the_picture(files: str) -> None:
    image_BCHW = pictures(1, 8, 12).repeat_interleave(2, 2).repeat_interleave(2, 3)
    map_BCHW = both_halves(stored(files), image_BCHW, 0)
    assert map_BCHW.shape == (1, 1, 16, 24)
    grey_HW = image_BCHW.float().mean(dim=1)[0] / 255
    assert (map_BCHW[0, 0] - grey_HW).abs().mean() < 0.05
    torch.testing.assert_close(map_BCHW.mean(), grey_HW.mean(), rtol=0.02, atol=0)


def test_pictures_are_normalised_before_and_maps_scaled_after(files: str) -> None:
    image_BCHW = pictures(1, 16, 16)
    plain = both_halves(stored(files), image_BCHW, 0)
    shifted = both_halves(stored(files, mean=[0.5] * 3, std=[0.25] * 3), image_BCHW, 0)
    torch.testing.assert_close(shifted, (plain - 0.5) / 0.25, rtol=1e-4, atol=1e-5)
    transform = stored(files, scaling="picture").sample_transform()
    made = transform(image_BCHW[0].numpy(), torch.Generator())["control_map"]
    assert (made.min(), made.max()) == (0.0, 1.0)


def test_an_output_that_is_not_there_is_refused_with_those_that_are(files: str) -> None:
    with pytest.raises(ConfigError, match=r"task.filter.output=depth: the network's outputs are grey, colours"):
        stored(files, output="depth").sample_transform()


def test_more_channels_than_the_network_has_are_refused(files: str) -> None:
    with pytest.raises(ConfigError, match=r"shape \(1, 1, 4, 4\), which holds no maps of 2 channels"):
        both_halves(stored(files, channels=2), pictures(1, 8, 8), 0)


def test_a_network_of_one_size_is_refused_any_other(tmp_path: Path) -> None:
    path = onnx_files.two_maps(tmp_path / "fixed.onnx", size=64)
    assert both_halves(stored(path, resize=64), pictures(1, 50, 70), 0).shape == (1, 1, 50, 70)
    with pytest.raises(ConfigError, match=r"task.filter.resize=32: this network takes \[64, 64\] px alone"):
        stored(path, resize=32).sample_transform()


def test_a_network_of_two_inputs_is_refused(tmp_path: Path) -> None:
    inputs = [onnx_files.picture(1, 3, 8, 8), helper.make_tensor_value_info("time", TensorProto.FLOAT, [1])]
    nodes = [helper.make_node("Add", ["image", "time"], ["map"])]
    path = onnx_files.save(tmp_path / "two.onnx", nodes, inputs, ["map"], {})
    with pytest.raises(ConfigError, match=r"takes image tensor\(float\), time tensor\(float\); it must take one fp32"):
        stored(path).sample_transform()


@pytest.mark.parametrize("options", [{"std": [1.0, 1.0, 0.0]}, {"mean": [0.5]}])
def test_what_is_no_mean_or_deviation_of_colours_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="give three numbers each, for RGB"):
        stored("any.onnx", **options)
