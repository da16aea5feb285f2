"""An imported file of the original behaves as its trainer, or as this library on request, and says which."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.unit.commands.test_recipe import official, run
from tests.unit.config.composing import checked
from tests.unit.config.defaults import RECIPES
from tests.unit.config.test_every_option import CONTROLNETS

EVERYWHERE = {"data.replacement": True, "optimizer.decay": "all", "lr_scheduler.from_zero": True}
ONE_SHAPE = {"data.crop": "saliency"}
SEVERAL_SHAPES = {"data.crop": "random", "data.buckets.distance": "linear", "data.buckets.random_share": 0.05}
ADAPTIVE = {"objective.loss_weight.update": "micro_batch", "objective.loss_weight.duplicates": "last"}
STAGE_C = {"model.image_encoder.antialias": False}
STAGE_B = {"objective.noise.square_grids": True}
ADAPTERS = {"task.init": "original", "task.alpha": 1.0, "task.joint_qkv": True}
EXPECTED: dict[str, dict[str, Any]] = {
    "finetune_c_3b": SEVERAL_SHAPES | ADAPTIVE | STAGE_C,
    "finetune_c_3b_lowres": SEVERAL_SHAPES | ADAPTIVE | STAGE_C,
    "finetune_c_3b_v": SEVERAL_SHAPES | ADAPTIVE | STAGE_C,
    "finetune_c_1b": ONE_SHAPE | STAGE_C,
    "finetune_c_3b_lora": SEVERAL_SHAPES | STAGE_C | ADAPTERS,
    "finetune_b_3b": ONE_SHAPE | ADAPTIVE | STAGE_B,
    **dict.fromkeys(CONTROLNETS, ONE_SHAPE | STAGE_C),
}
"""What each file's behaviour adds to `EVERYWHERE`; finetune_b_700m is that of the larger Stage B."""
EXPECTED["finetune_b_700m"] = EXPECTED["finetune_b_3b"]


@pytest.fixture(autouse=True)
def _every_extra_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "wandb" else find_spec(name))


@pytest.mark.parametrize("name", RECIPES)
def test_the_originals_behaviour_is_the_default_and_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = run(tmp_path, official(name))
    assert code == 0
    printed, written = capsys.readouterr().out, (folder / "experiment" / "mine.yaml").read_text()
    cfg = checked("experiment=mine", *CONTROLNETS.get(name, []), extra=folder)
    expected = EVERYWHERE | EXPECTED[name]
    assert {key: OmegaConf.select(cfg, key) for key in expected} == expected
    assert "behaviour=original: set as the original trainer does" in printed
    assert "\n# behaviour=original: set as the original trainer does" in written
    for text in (printed, written.replace("\n# ", " ")):
        assert all(f"{key}={str(value).lower()}" in text for key, value in expected.items())


@pytest.mark.parametrize("name", RECIPES)
def test_ours_leaves_everything_else_to_this_library(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = CONTROLNETS.get(name, [])
    code, folder = run(tmp_path, official(name), "behaviour=ours")
    assert code == 0
    assert "behaviour=ours: left to this library" in capsys.readouterr().out
    assert "\n# behaviour=ours: left to this library" in (folder / "experiment" / "mine.yaml").read_text()
    mine = checked("experiment=mine", *files, extra=folder)
    default = checked(*choices(folder), *files, "data.urls=[a.tar]")
    for key in EVERYWHERE | EXPECTED[name]:
        assert OmegaConf.select(mine, key) == OmegaConf.select(default, key), key


def choices(folder: Path) -> list[str]:
    """Return the recipe's choices of groups alone, as overrides."""
    listed = OmegaConf.load(folder / "experiment" / "mine.yaml").defaults
    pairs = [next(iter(each.items())) for each in listed]
    return [f"{group.removeprefix('override /')}={option}" for group, option in pairs if "tracker" not in group]


def test_the_recipe_of_adapters_that_ships_has_the_originals() -> None:
    cfg = checked("experiment=finetune_c_3b_lora", "data.urls=[a.tar]")
    assert {key: OmegaConf.select(cfg, key) for key in ADAPTERS} == ADAPTERS
