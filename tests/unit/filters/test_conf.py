"""The files of `conf/filter` make filters; their numbers are held by tests/unit/config/test_defaults.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from cascade_train.assembly.build import build_node
from cascade_train.config.groups import conf_dir, group_options
from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlFilter

OPTIONS = [option for option in group_options("filter") if option != "own"]
"""`own` names no class."""


def config(option: str) -> DictConfig:
    """Return the configuration of a filter, with a name where it leaves one to the user."""
    cfg = OmegaConf.load(Path(conf_dir()) / "filter" / f"{option}.yaml")
    for key in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, key, "torch.nn.Identity" if key.endswith("_target_") else "brought.onnx")
    return cfg


@pytest.mark.parametrize("option", OPTIONS)
def test_a_file_makes_a_filter(option: str) -> None:
    assert isinstance(build_node(config(option)), ControlFilter)


OUT_OF_RANGE: dict[str, tuple[float, str]] = {
    **dict.fromkeys(("channels", "max_faces", "resize"), (0, "must be (greater than 0|at least 8)")),
    **dict.fromkeys(("p_drop", "p_full", "p_outpaint"), (1.5, r"must lie in \[0.0, 1.0\]")),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_numbers_out_of_range_are_refused(option: str) -> None:
    for key in OUT_OF_RANGE.keys() & set(config(option)):
        value, rule = OUT_OF_RANGE[key]
        with pytest.raises(ValueError, match=f"task.filter.{key}={value} {rule}"):
            build_node(OmegaConf.merge(config(option), {key: value}))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("depth", r"model.onnx \(licence: its own; .* Apache-2.0"),
        ("inpaint_saliency", r"saliency_model.pt \(licence: MIT"),
        ("sketch", r"table5_pidinet.pth \(licence: research alone"),
    ],
)
def test_a_network_that_is_not_there_is_described_before_workers_start(option: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"task.filter.weights=.*brought.onnx: no such file.*{words}"):
        build_node(config(option)).sample_transform()
