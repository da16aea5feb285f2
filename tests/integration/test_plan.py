"""`cascade-train plan` of the original's recipes at full size: one of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from cascade_train import plan
from cascade_train.__main__ import launch
from tests.integration.runs import SMALL, train

pytestmark = pytest.mark.slow

NOT_IN_RECIPE = {"sd_finetune": ["data.num_examples_to_see=100000"]}
"""What a recipe leaves to its user and a plan needs."""

OF_EACH_KIND = ("controlnet_c_3b_canny", "finetune_b_700m", "finetune_c_1b", "finetune_c_3b_lora")
OTHERS = (
    *("controlnet_c_3b_identity", "controlnet_c_3b_inpainting", "controlnet_c_3b_sr", "finetune_b_3b", "finetune_c_3b"),
    *("finetune_c_3b_lowres", "finetune_c_3b_v", "sd_finetune", "sdxl_finetune", "sdxl_lora"),
)


@pytest.mark.parametrize("recipe", [*OF_EACH_KIND, *(pytest.param(name, marks=pytest.mark.recipes) for name in OTHERS)])
def test_a_recipe_is_planned_without_its_data_and_leaves_nothing(recipe: str, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(["plan", f"experiment={recipe}", *NOT_IN_RECIPE.get(recipe, [])]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{recipe}: ")
    for words in ("8 ranks", " GB", "Data     not opened: data.", "=(not given)"):
        assert words in text
    assert not list(tmp_path.iterdir())


def test_a_plan_says_what_the_run_then_does(tmp_path: Path):
    """Steps, samples and size of a checkpoint, where epochs end before the steps."""
    own = ("task=finetune", "train.max_steps=50", "train.max_epochs=2", "data.samples=21")
    more = ("data.num_workers=0", "checkpoint.keep_last=null", "ema.decay=0.9")
    found = plan(*SMALL, *own, *more)
    run = train(tmp_path / "run", *own, *more)
    checkpoints = sorted((run / "checkpoints").glob("step_*"))
    assert found.steps == int(checkpoints[-1].name.removeprefix("step_")) == 6
    assert len(checkpoints) == found.checkpoints == 3
    written = sum(file.stat().st_size for folder in checkpoints for file in folder.rglob("*"))
    assert found.disk_bytes == pytest.approx(written, rel=0.1), "each tensor has a kilobyte beside it"
    exported = sum(file.stat().st_size for file in (run / "export/prior/prior").rglob("*.safetensors"))
    assert found.export_bytes == pytest.approx(exported, rel=0.05)
