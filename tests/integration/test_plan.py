"""`cascade-train plan` of the original's recipes at full size: one of each kind; and in what time each of them."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.memory import RECIPES
from cascade_train import plan
from cascade_train.__main__ import GC_THRESHOLD, launch
from tests.integration.runs import SMALL, train

pytestmark = pytest.mark.slow

MOST_OF_NEEDS = 3
"""CPU time of a plan without its imports beside that of importing what a training needs, 6 s.

A plan of one recipe may take 20 s, imports and all; `sdxl_lora` takes most, a third of it peft's 560 adapters."""

PLANNED = (*RECIPES, "sd_finetune", "sdxl_finetune", "sdxl_lora")
NOT_IN_RECIPE = {"sd_finetune": ["data.num_examples_to_see=100000"]}
"""What a recipe leaves to its user and a plan needs."""

NEEDS = """
import torch
import torch.distributed.checkpoint
from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet
from transformers import CLIPTextModelWithProjection

weight = torch.nn.Parameter(torch.ones(1))
weight.sum().backward()
torch.optim.AdamW([weight]).step()
"""

OF_EACH_KIND = ("controlnet_c_3b_canny", "finetune_b_700m", "finetune_c_1b", "finetune_c_3b_lora")


def planned(recipe: str, capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """Plan a recipe in an empty folder, check what is said and that nothing is left, and return it."""
    assert launch(["plan", f"experiment={recipe}", *NOT_IN_RECIPE.get(recipe, [])]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{recipe}: ")
    assert "8 ranks" in text
    assert "Data     not opened: data." in text
    assert "=(not given)" in text
    assert not list(folder.iterdir())
    return text


@pytest.mark.parametrize("recipe", OF_EACH_KIND)
def test_a_recipe_is_planned(recipe: str, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "GB" in planned(recipe, capsys, tmp_path)


@pytest.fixture(scope="module")
def needs() -> float:
    """CPU seconds of importing torch, diffusers' network and transformers' towers, which are imported here, too."""
    for model in ("c_tiny", "sdxl_tiny"):
        assert launch(["plan", "task=lora", f"model={model}"]) == 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-c", NEEDS], check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


@pytest.mark.recipes
@pytest.mark.parametrize("recipe", PLANNED)
def test_a_recipe_is_planned_in_time(recipe: str, needs: float, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    thresholds = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD)  # as a command
    try:
        begun = time.process_time()
        planned(recipe, capsys, tmp_path)
        taken = time.process_time() - begun
    finally:
        gc.set_threshold(*thresholds)
    assert taken < MOST_OF_NEEDS * needs


def test_a_plan_says_what_the_run_then_does(tmp_path: Path):
    """Steps, samples and size of a checkpoint, where epochs end before the steps."""
    own = ("task=finetune", "train.max_steps=50", "train.max_epochs=2", "data.samples=21")
    more = ("data.num_workers=0", "checkpoint.keep_last=null", "ema.decay=0.9")
    found = plan(*SMALL, *own, *more)
    run = train(tmp_path / "run", *own, *more)
    checkpoints = sorted((run / "checkpoints").glob("step_*"))
    assert found.steps == int(checkpoints[-1].name.removeprefix("step_")) == 4
    assert len(checkpoints) == found.checkpoints == 2
    written = sum(file.stat().st_size for folder in checkpoints for file in folder.rglob("*"))
    assert found.disk_bytes == pytest.approx(written, rel=0.1), "each tensor has a kilobyte beside it"
    exported = sum(file.stat().st_size for file in (run / "export/prior/prior").rglob("*.safetensors"))
    assert found.export_bytes == pytest.approx(exported, rel=0.05)
