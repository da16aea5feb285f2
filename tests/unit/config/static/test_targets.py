"""What a configuration of one's own may name without being asked: components, by whatever path."""

from __future__ import annotations

import pytest

from cascade_train.config.components import check_component
from cascade_train.config.static.targets import check_confined, is_trusted
from cascade_train.errors import ConfigError

ATTACKS = (
    "torch.hub.load",
    "torch.load",
    "torch.os.system",
    "torch.utils.cpp_extension.load_inline",
    "torch.utils.cpp_extension.BuildExtension",
    "torch.package.PackageImporter",
    "torch.multiprocessing.spawn",
    "torch.nn.modules.module.torch.hub.load",
    "torch.optim.Nothing",
    "cascade_train.data.tar.stream.stream_samples",
    "cascade_train.data.tar.stream.subprocess.run",
    "cascade_train.files.durable.write_durably",
    "cascade_train.models.formats.weights_tensors.torch.load",
    "cascade_train.__main__.launch",
    "cascade_train.commands.generate.generate",
)
COMPONENTS = ("torch.optim.SGD", "torch.nn.Identity", "cascade_train.models.stage_c.StageC", "mypackage.Anything")


@pytest.mark.parametrize("target", ATTACKS)
def test_what_is_no_component_is_refused(target: str) -> None:
    with pytest.raises(
        ConfigError, match=f"task._target_={target} is no component. Of torch .* run.allow_any_target=true"
    ):
        check_confined("task", target)
    assert not is_trusted(target)


@pytest.mark.parametrize("target", [*COMPONENTS, "cascade_train.filters.torch_network.load_exported"])
def test_components_pass(target: str) -> None:
    check_confined("task", target)


@pytest.mark.parametrize(
    "hidden",
    [
        lambda node: {"a": {"b": node}},
        lambda node: {"a": [1, [node]]},
        lambda node: {"_target_": "torch.nn.Sequential", "_args_": [node]},
        lambda node: {"_args_": [], "_convert_": "none", "_recursive_": False, "inner": node},
    ],
)
def test_no_place_hides_a_target(hidden) -> None:
    with pytest.raises(ConfigError, match=r"torch\.hub\.(load|list)"):
        check_component("task", hidden({"_target_": "torch.hub.list", "github": "evil/repo"}), ["torch"])


def test_whoever_lifts_the_rule_may_name_anything() -> None:
    check_component("task", {"_target_": "torch.hub.list", "github": "owner/name"}, None)
