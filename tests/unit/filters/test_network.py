"""A user's network of torch makes the maps of a batch on the device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlFilter
from cascade_train.filters.network import NetworkFilter, load_exported
from tests.unit.filters.filter_contract import CPU, ControlFilterContract, both_halves, encode, pictures


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


def test_a_network_that_is_made_too_early_is_refused() -> None:
    with pytest.raises(ValueError, match="network: is made at once; give it `_partial_: true`"):
        network(network=Depth())
