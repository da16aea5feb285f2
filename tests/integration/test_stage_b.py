"""Stage B through the real entry point: trains, paints, resumes, and its weights and adapters come out and go in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cascade_train.assembly.components import build_component
from cascade_train.commands.export import ExportArgs, export
from cascade_train.commands.generate import GenerateArgs, generate
from cascade_train.commands.merge import MergeArgs, merge
from cascade_train.config.saved import load_saved_config
from tests.integration.runs import read_metrics, train

pytestmark = pytest.mark.slow

STAGE_B = ("model=b_tiny", "task=reconstruction", "train.global_batch_size=4")
WEIGHTS = Path("export", "decoder", "decoder", "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with grids, checkpoints and an average."""
    more = ("train.max_steps=4", "checkpoint.every_steps=2", "sample.every_steps=4", "sample.steps=2", "ema.decay=0.9")
    return train(tmp_path_factory.mktemp("b") / "run", *STAGE_B, *more, "objective=adaptive")


def test_the_grid_shows_originals_and_reconstructions(run: Path) -> None:
    pictures = sorted(path.name for path in (run / "samples" / "step_4").iterdir())
    assert "grid.png" in pictures
    with Image.open(run / "samples" / "step_4" / "00_sample.png") as picture:
        assert picture.size == (96, 96)
    assert {"loss", "loss_raw", "grad_norm"} <= read_metrics(run)[-1].keys()


def test_weights_come_out_in_the_originals_layout_and_train_on(run: Path, tmp_path: Path) -> None:
    assert export(ExportArgs(source=str(run / "export"), format="original", out=str(tmp_path))) == 0
    file = tmp_path / "decoder.original.safetensors"
    stored = load_file(file)
    assert "clip_mapper.weight" in stored
    assert any(name.endswith("attention.attn.in_proj_weight") for name in stored)
    for source in (run, file):
        folder = tmp_path / f"from {source.name}"
        train(folder, *STAGE_B, f"model.weights={source}", "train.max_steps=1", "optimizer.lr=1e-9")
        first, second = (load_file(each / WEIGHTS) for each in (run, folder))
        assert all(torch.allclose(value, second[name], rtol=0, atol=1e-7) for name, value in first.items())


def test_an_adapter_trains_on_it_and_merges_into_it(run: Path, tmp_path: Path) -> None:
    changed = ("task=lora", f"model.weights={run}", "train.max_steps=2", "optimizer.lr=0.1")
    train(tmp_path / "lora", *STAGE_B, *changed)
    adapter = load_file(tmp_path / "lora" / "export" / "lora" / "adapter_model.safetensors")
    assert any(value.any() for name, value in adapter.items() if ".lora_B." in name)
    assert merge(MergeArgs(source=str(run), lora=str(tmp_path / "lora"), out=str(tmp_path / "merged"))) == 0
    before, after = load_file(run / WEIGHTS), load_file(tmp_path / "merged" / "diffusion_pytorch_model.safetensors")
    different = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert different
    assert all(".attention.to_" in name for name in different)


def decibels(left: Path, right: Path) -> float:
    """Return the PSNR of two pictures."""
    first, second = (np.asarray(Image.open(path)).astype(float) / 255 for path in (left, right))
    return float(-10 * np.log10(np.square(first - second).mean()))


def test_by_default_samples_show_the_picture_in_training_and_in_generate(tmp_path: Path) -> None:
    validated = ("validate.every_steps=1", "validate.share=0.05", "validate.samples=4", "validate.reconstructions=8")
    short = ("train.max_steps=1", "optimizer.lr=1e-9", "sample.steps=10")
    run = train(tmp_path / "run", *STAGE_B, *short, *validated)
    row = read_metrics(run)[-1]
    _, prompt, picture = build_component(load_saved_config(run), "data").draw(0)
    picture.save(tmp_path / "picture.png")
    for name, given in (("default", {}), ("guided", {"guidance_scale": 4.0})):
        image, out = str(tmp_path / "picture.png"), str(tmp_path / name)
        assert generate(GenerateArgs(source=str(run), prompts=[prompt], image=image, out=out, **given)) == 0
    default, guided = (decibels(tmp_path / each / "00_00.png", Path(image)) for each in ("default", "guided"))
    assert default > guided + 3
    assert row["validate/psnr"] > row["validate/psnr_bilinear"] - 1
    assert row["validate/ssim"] > 0.6
