"""The official recipes of Stage B at a reduced size: two steps of each, by the recipe's own numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from cascade_train.__main__ import launch
from cascade_train.assembly import run as build
from cascade_train.config.saved import to_plain
from cascade_train.diffusion.noise import PyramidNoise
from cascade_train.engine.loop import Trainer
from cascade_train.models.cascade.convolutional import ConvolutionalCompressor
from tests.integration.runs import read_metrics
from tests.integration.test_stage_a import NARROW as A_NARROW
from tests.unit.config.composing import checked
from tests.unit.config.defaults import RECIPES
from tests.unit.data import tars

pytestmark = pytest.mark.slow

NARROW = (
    *("block_out_channels=[16,16,32,32]", "conditioning_dim=32", "clip_text_pooled_in_channels=32"),
    *("down_num_layers_per_block=[1,1,1,1]", "up_num_layers_per_block=[1,1,1,1]"),
)
TOWER = (
    *("hidden_size=32", "intermediate_size=32", "num_hidden_layers=1", "num_attention_heads=2", "projection_dim=32"),
)
TWIN = (
    *("debug=random_weights", "model.image_size=128", *(f"model.network.{each}" for each in NARROW)),
    *(f"model.text_encoder.{each}" for each in TOWER),
    "model.semantic_compressor._target_=cascade_train.models.cascade.convolutional.ConvolutionalCompressor",
    *(f"model.stage_a.{each}" for each in A_NARROW),
    *("train.max_steps=2", "train.global_batch_size=4", "data.num_workers=0", "sample.count=1"),
)
"""What is smaller than in the recipe; the number of heads follows the recipe's levels with and without attention."""

HEADS = {"finetune_b_3b": "[0,0,2,2]", "finetune_b_700m": "[0,2,2,2]"}


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    """Return every value below a node that is no mapping, by its key."""
    if not isinstance(node, dict):
        return {path: node}
    return {k: v for name, value in node.items() for k, v in leaves(value, f"{path}.{name}".lstrip(".")).items()}


def differing(run: Path, recipe: dict[str, Any]) -> set[str]:
    """Return the keys in which what ran is not what the recipe says."""
    ran: Any = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    given, expected = leaves(ran), leaves(recipe)
    return {key for key in given.keys() | expected.keys() if given.get(key) != expected.get(key)}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What a run is made of and meets: the trainer, shapes of noise, and sides of pictures before the compressor."""
    seen: dict[str, list[Any]] = {"trainer": [], "noise": [], "sides": []}
    build_trainer, draw, encode = build.build_trainer, PyramidNoise.draw, ConvolutionalCompressor.encode

    def built(*given: Any) -> Trainer:
        seen["trainer"].append(build_trainer(*given))
        return seen["trainer"][0]

    def drawn(noise: PyramidNoise, generators: Any, shape: Any) -> torch.Tensor:
        seen["noise"].append(shape)
        return draw(noise, generators, shape)

    def encoded(compressor: Any, image: torch.Tensor) -> torch.Tensor:
        seen["sides"].append(image.shape[-1])
        return encode(compressor, image)

    monkeypatch.setattr(build, "build_trainer", built)
    monkeypatch.setattr(PyramidNoise, "draw", drawn)
    monkeypatch.setattr(ConvolutionalCompressor, "encode", encoded)
    return seen


def test_every_official_recipe_of_stage_b_is_tried() -> None:
    assert HEADS.keys() == {name for name in RECIPES if name.startswith("finetune_b_")}


@pytest.mark.parametrize("name", HEADS)
def test_a_recipe_trains_at_a_reduced_size_as_it_says(name: str, seen: dict[str, list[Any]], tmp_path: Path) -> None:
    urls = f"data.urls={tars.write(tmp_path / 'a.tar', tars.samples(range(8)))}"
    twin = (*TWIN, f"model.network.num_attention_heads={HEADS[name]}")
    run = tmp_path / "run"
    assert launch([f"experiment={name}", urls, *twin, f"run.dir={run}"]) == 0
    reduced = {each.partition("=")[0] for each in twin} | {"model.weights", "model.random_encoders", "data.image_size"}
    recipe = to_plain(checked(f"experiment={name}", urls, f"run.dir={run}"))
    assert differing(run, recipe) <= reduced | {"train.micro_batch_size", "data.listing"}
    rows = read_metrics(run)
    assert [row["lr"] for row in rows] == [recipe["optimizer"]["lr"]] * 2 == [1e-4] * 2
    assert all(math.isfinite(row[key]) and row[key] > 0 for row in rows for key in ("loss", "loss_raw", "grad_norm"))
    assert (run / "samples" / "step_2" / "grid.png").is_file()
    assert (run / "export" / "decoder").is_dir()
    assert set(seen["noise"]) == {(4, 32, 32)}
    assert {64, 96} <= set(seen["sides"]) <= {64, 96, 128}, (
        "model.shrink_range in training, the whole picture to sample"
    )
    (trainer,) = seen["trainer"]
    assert recipe["train"]["precision"] == "bf16"
    assert {parameter.dtype for parameter in trainer.task.stage.network.parameters()} == {torch.float32}
    assert RECIPES[name]["adaptive_loss_weight"] is True
    assert type(trainer.task.objective.loss_weight).__name__ == "AdaptiveLossWeight"
    moved = [value for value in trainer.task.state_dict().values() if value.numel() > 1 and value.unique().numel() > 1]
    assert moved, "the adaptive weight has learned from two steps"
