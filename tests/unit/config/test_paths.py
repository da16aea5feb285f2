"""Paths of weights are saved as absolute, hub ids and other words as they are."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cascade_train.config.paths import make_absolute


def test_existing_paths_at_any_depth_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edges.pth").touch()
    (tmp_path / "models").mkdir()
    node = OmegaConf.create(
        {
            "weights": "models",
            "seed": 3,
            "filter": {"weights": "edges.pth", "detector": "gone.onnx", "name": "edges.pth", "network": "???"},
            "previewer": {"weights": "stabilityai/stable-cascade:previewer.safetensors"},
            "semantic_compressor": None,
        }
    )
    make_absolute(node)
    assert node.weights == str(tmp_path / "models")
    assert node.filter.weights == str(tmp_path / "edges.pth")
    assert (node.filter.detector, node.filter.name) == ("gone.onnx", "edges.pth")
    assert node.previewer.weights == "stabilityai/stable-cascade:previewer.safetensors"
