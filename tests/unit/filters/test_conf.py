"""The files of `conf/filter` make filters; their numbers are held by tests/unit/config/test_defaults.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cascade_train.config.components import construct
from cascade_train.config.groups import conf_dir, group_options
from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlFilter

OPTIONS = [option for option in group_options("filter") if option != "own"]
"""`own` names no class."""


def made(option: str) -> ControlFilter:
    """Return the filter of a file, with a name where it leaves one to the user."""
    cfg = OmegaConf.load(Path(conf_dir()) / "filter" / f"{option}.yaml")
    for key in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, key, "torch.nn.Identity" if key.endswith("_target_") else "brought.onnx")
    return construct(cfg)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_file_makes_a_filter(option: str) -> None:
    assert isinstance(made(option), ControlFilter)


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
        made(option).sample_transform()
