"""The recipes of open-diffusion, EveryDream and MindONE at a reduced size train."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cascade_train.__main__ import launch
from cascade_train.config.saved import to_plain
from tests.integration.runs import read_metrics
from tests.integration.test_recipes_of_stage_b import differing
from tests.unit.config.composing import checked
from tests.unit.config.seeds import HELD
from tests.unit.data import tars
from tests.unit.data.test_folder import folder, write
from tests.unit.models.stages import model_config

pytestmark = pytest.mark.slow

SIZES = ("network", "text_encoder", "text_encoder_2", "vae")
SHAPES = ((40, 40), (120, 30), (30, 120))
FEW = {
    "model.image_size": 32, "model.random_encoders": True, "model.weights": None, "train.precision": "fp32",
    "data.num_workers": 0, "sample.every_steps": None,
}  # fmt: skip
STEPS = {"train.max_steps": 1, "train.global_batch_size": 2, "train.micro_batch_size": 2}
EPOCHS = {
    "data.repeats.pictures": 1, "data.buckets.multiple_px": 8, "validate.share": 0.4, "validate.samples": 2,
    "validate.logsnr": [0.0], "train.global_batch_size": 2, "train.micro_batch_size": 2, "model.image_size": 32,
}  # fmt: skip
"""What is smaller in the runs of EveryDream, which keep their four epochs."""


def reduced(recipe: str) -> dict[str, Any]:
    """Return what makes of a recipe its twin: every size of the tiny model of its family, and little data."""
    tiny = to_plain(model_config("sdxl_tiny" if recipe.startswith("sdxl") else "sd_tiny"))
    sizes = {f"model.{part}.{key}": value for part in SIZES for key, value in tiny.get(part, {}).items()}
    sizes = {key: value for key, value in sizes.items() if "_target_" not in key and "hidden_layer" not in key}
    return sizes | FEW | (EPOCHS if "everydream" in recipe else STEPS)


def typed(values: dict[str, Any]) -> list[str]:
    """Return values by key as overrides."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def write_tar(path: Path, ending: str, content: Any) -> Path:
    """Write six pictures, each with one more file of an ending."""
    files = []
    for number in range(6):
        files += [(f"{number}.png", tars.picture(tint=number)), (f"{number}.{ending}", content(number).encode())]
        files += [(f"{number}.json", json.dumps({"pwatermark": 0.2 * number}).encode())] if ending == "txt" else []
    return tars.write(path, files)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in a folder of all shapes, a table of them, and tars with captions and with classes."""
    root, rows = tmp_path_factory.mktemp("data"), ["dir,text"]
    for number in range(6):
        name = f"folder/deep/a cat on a mat_({number}).png"
        write(root / name, tars.picture(*SHAPES[number % 3], tint=30 * number))
        rows.append(f"{name},a cat {number}")
    (root / "img_txt.csv").write_text("\n".join(rows) + "\n")
    (root / "prompts.json").write_text(json.dumps({"0": "a tench", "1": ["a goldfish", "a photo of a goldfish"]}))
    write_tar(root / "captions.tar", "txt", lambda number: f"picture {number}")
    write_tar(root / "classes.tar", "cls", lambda number: str(number % 2))
    return root


def places(recipe: str, root: Path) -> list[str]:
    """Return where a recipe's data is."""
    if recipe.startswith("sdxl"):
        return [f"data.path={root / 'img_txt.csv'}"]
    if "everydream" in recipe:
        return [f"data.sources.pictures.path={root / 'folder'}"]
    if recipe == "sd_imagenet":
        return [f"data.urls={root / 'classes.tar'}", f"data.idx_to_prompt={root / 'prompts.json'}"]
    return [f"data.urls={root / 'captions.tar'}", "data.num_examples_to_see=6"]


def trained(name: str, root: Path, run: Path, *more: str) -> list[dict[str, Any]]:
    """Train a recipe's twin, assert that all else was as the recipe says, and return its metrics."""
    twin, where = reduced(name), places(name, root)
    assert launch([f"experiment={name}", *where, *typed(twin), *more, f"run.dir={run}"]) == 0
    recipe = to_plain(checked(f"experiment={name}", *where, *more, f"run.dir={run}"))
    sizes = {"data.image_size", "data.sources.pictures.image_size"}
    assert differing(run, recipe) <= {*twin, *sizes, "data.listing"}
    rows = read_metrics(run)
    assert all(math.isfinite(row[key]) and row[key] > 0 for row in rows for key in ("loss", "grad_norm"))
    schedule = recipe["lr_scheduler"]
    first = 0.0 if schedule["from_zero"] else recipe["optimizer"]["lr"] / max(1, schedule["warmup_steps"])
    assert rows[0]["lr"] == pytest.approx(first)
    assert (run / "export" / ("lora" if name == "sdxl_lora" else "pipeline")).is_dir()
    return rows


@pytest.mark.parametrize("name", [name for name in HELD if name not in ("sd_everydream", "sdxl_cached")])
def test_a_recipe_trains_at_a_reduced_size_as_it_says(name: str, root: Path, tmp_path: Path) -> None:
    more = ["train.max_epochs=1"] if name == "sd_everydream_first" else []
    rows = trained(name, root, tmp_path / "run", *more)
    assert rows
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_everydreams_checkpoints_come_with_each_epoch_and_its_captions_from_names(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rows = trained("sd_everydream", root, run)
    steps = [row["step"] for row in rows if "validate/loss" in row]
    saved = sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir())
    assert len(steps) == 4
    assert steps == saved == [round(rows[-1]["step"] * epoch / 4) for epoch in (1, 2, 3, 4)]
    source = folder(root / "folder")
    assert len(source.open()) == 6
    assert {source.read(row).caption for row in range(6)} == {"a cat on a mat"}


def test_mindones_recipe_trains_on_the_cache_of_the_other(root: Path, tmp_path: Path) -> None:
    pictures = ["experiment=sdxl_finetune", "data.crop=center", *places("sdxl_finetune", root)]
    twin = reduced("sdxl_cached")
    assert launch(["cache", *pictures, *typed(twin), f"out={tmp_path / 'cache'}"]) == 0
    there, run = f"data.path={tmp_path / 'cache'}", tmp_path / "run"
    assert launch(["experiment=sdxl_cached", there, *typed(twin), f"run.dir={run}"]) == 0
    assert [math.isfinite(row["loss"]) for row in read_metrics(run)] == [True]
