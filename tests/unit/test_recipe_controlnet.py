"""The original's ControlNet recipes: their numbers, and that an imported file is the recipe that ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.composing import checked
from tests.unit.config.test_every_option import CONTROLNETS
from tests.unit.test_recipe import COMMON, run

BLOCKS = [0, 4, 8, 12, 51, 55, 59, 63]
SIZES = [["width", "lambda w: w >= 768"], ["height", "lambda h: h >= 768"]]
SHARED = {**COMMON, "batch_size": 256, "updates": 10000, "backup_every": 2000, "save_every": 1000,
          "multi_aspect_ratio": None, "captions_getter": ["txt", "identity"], "dataset_filters": SIZES,
          "controlnet_blocks": BLOCKS}  # fmt: skip
OFFICIAL: dict[str, dict[str, Any]] = {
    "controlnet_c_3b_canny": {"controlnet_filter": "CannyFilter", "controlnet_filter_params": {"resize": 224}},
    "controlnet_c_3b_inpainting": {
        "controlnet_filter": "InpaintFilter",
        "controlnet_filter_params": {"thresold": [0.04, 0.4], "p_outpaint": 0.4},
        "offset_noise": 0.1,
    },
    "controlnet_c_3b_sr": {
        "controlnet_filter": "SREffnetFilter",
        "controlnet_filter_params": {"scale_factor": 0.5},
        "controlnet_bottleneck_mode": "large",
        "offset_noise": 0.1,
        "updates": 30000,
        "backup_every": 5000,
    },
    "controlnet_c_3b_identity": {
        "controlnet_filter": "IdentityFilter",
        "controlnet_filter_params": {"max_faces": 4, "p_drop": 0.05, "p_full": 0.3},
        "controlnet_bottleneck_mode": "simple",
        "controlnet_blocks": list(range(64)),
        "updates": 200000,
    },
}
"""What each official file sets beside what they share."""


@pytest.fixture(autouse=True)
def _every_extra_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "wandb" else find_spec(name))


@pytest.mark.parametrize("name", OFFICIAL)
def test_an_imported_official_file_equals_the_recipe_that_ships(name: str, tmp_path: Path) -> None:
    code, folder = run(tmp_path, {"experiment_id": name, **SHARED, **OFFICIAL[name]}, "behaviour=ours")
    assert code == 0
    mine = checked("experiment=mine", *CONTROLNETS[name], extra=folder)
    ours = checked(f"experiment={name}", "data.urls=[a.tar]", *CONTROLNETS[name])
    for node in ("train", "optimizer", "lr_scheduler", "objective", "parallel", "checkpoint", "sample", "ema", "task"):
        assert mine[node] == ours[node], node
    assert (mine.run.name, mine.model.image_size) == (ours.run.name, ours.model.image_size) == (name, 768)
    assert (mine.data.aspect_ratios, mine.model.network) == (ours.data.aspect_ratios, ours.model.network)
    assert ours.data.row_filters == [["width", ">=768"], ["height", ">=768"]]


def test_the_recipes_that_ship_have_the_official_numbers() -> None:
    assert set(OFFICIAL) == set(CONTROLNETS)
    cfg = {n: checked(f"experiment={n}", "data.urls=[a.tar]", *files) for n, files in CONTROLNETS.items()}
    numbers = {
        n.removeprefix("controlnet_c_3b_"): (
            c.train.global_batch_size, c.train.max_steps, c.checkpoint.keep_every_steps, c.task.bottleneck,
            len(c.task.blocks), c.objective.offset_noise, c.task.backbone_weights, c.optimizer.lr,
        )
        for n, c in cfg.items()
    }  # fmt: skip
    assert numbers == {
        "canny": (256, 10000, 2000, "effnet", 8, 0.0, "imagenet", 1e-4),
        "inpainting": (256, 10000, 2000, "effnet", 8, 0.1, "imagenet", 1e-4),
        "sr": (256, 30000, 5000, "large", 8, 0.1, None, 1e-4),
        "identity": (256, 200000, 2000, "simple", 64, 0.0, None, 1e-4),
    }


def test_files_that_the_original_finds_by_itself_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "controlnet_c_3b_inpainting"
    assert run(tmp_path, {"experiment_id": name, **SHARED, **OFFICIAL[name]})[0] == 0
    assert "its saliency network is task.filter.weights=saliency_model.pt" in capsys.readouterr().out
