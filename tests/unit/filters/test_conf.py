"""The filters of `conf/filter` have the reference's numbers, and are made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cascade_train.config.components import construct
from cascade_train.config.groups import conf_dir, group_options
from cascade_train.errors import ConfigError
from cascade_train.filters.base import ControlFilter

CHANNELS = {
    "canny": 1,
    "depth": 1,
    "identity": 512,
    "inpaint": 4,
    "inpaint_saliency": 4,
    "network": 1,
    "pose": 17,
    "qr": 1,
    "sketch": 1,
    "sr": 3,
    "sr_effnet": 16,
}
NUMBERS = {
    "canny": {"resize": 224, "low": 100, "high": 200},
    "identity": {"max_faces": 4, "p_drop": 0.05, "p_full": 0.3},
    "inpaint": {"threshold": [0.04, 0.4], "p_outpaint": 0.4, "weights": None},
    "inpaint_saliency": {"threshold": [0.04, 0.4], "p_outpaint": 0.4, "weights": "brought.onnx"},
    "qr": {"resize": 224, "blobify": True, "dilation_kernels": [3, 5, 7], "blur_kernels": [15]},
    "sketch": {"resize": 224, "dilation_kernels": [0, 3, 5, 7, 9], "binarize": True, "threshold": [0.05, 0.7]},
    "sr": {"scale_factor": 0.25},
    "sr_effnet": {"scale_factor": 0.5},
}
"""Of Stable Cascade's filters; `own` has none."""


def made(option: str) -> ControlFilter:
    """Return the filter of a file, with a name where it leaves one to the user."""
    cfg = OmegaConf.load(Path(conf_dir()) / "filter" / f"{option}.yaml")
    for key in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, key, "torch.nn.Identity" if key.endswith("_target_") else "brought.onnx")
    return construct(cfg)


def test_every_file_is_one_of_these() -> None:
    assert set(group_options("filter")) == {*CHANNELS, "own"}


@pytest.mark.parametrize("option", CHANNELS)
def test_a_file_makes_a_filter_of_its_channels(option: str) -> None:
    assert isinstance(made(option), ControlFilter)
    assert made(option).channels == CHANNELS[option]


@pytest.mark.parametrize("option", NUMBERS)
def test_a_file_has_the_numbers_of_the_reference(option: str) -> None:
    node = made(option).node()
    assert {key: node[key] for key in NUMBERS[option]} == NUMBERS[option]


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
