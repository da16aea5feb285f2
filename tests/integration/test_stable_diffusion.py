"""Runs of Stable Diffusion from the command line: sampled, merged, cached, planned and continued from."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

from cascade_train.__main__ import launch
from cascade_train.distributed.process_group import process_group
from cascade_train.results.find import find_model
from cascade_train.results.sampling import load_parts
from tests.integration.runs import cut_back, read_metrics, train
from tests.unit.models.stages import build_stage, untrained

pytestmark = pytest.mark.slow

SHORT = (
    *("train.global_batch_size=4", "train.max_steps=2", "data.num_workers=0", "checkpoint.every_steps=null"),
    *("optimizer.lr=1e-3", "data.samples=12"),
)
SD = (*untrained("sd_tiny"), "objective=ddpm")
UNET = Path("unet/diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("sd") / "sd", *SD, "task=finetune", *SHORT, "sample.steps=2",
                 "sample.every_steps=2", "sample.count=2")  # fmt: skip


def test_a_run_leaves_samples_and_a_pipeline(run: Path) -> None:
    assert (run / "samples" / "step_2" / "grid.png").is_file()
    pipeline = StableDiffusionPipeline.from_pretrained(run / "export" / "pipeline")
    assert pipeline.scheduler.config["prediction_type"] == "epsilon"
    assert "stable-diffusion" in (run / "export" / "README.md").read_text()


def test_its_pictures_are_made_again_and_its_network_is_written_in_bf16(run: Path, tmp_path: Path) -> None:
    asked = ["prompts=[a red circle]", "steps=2", "height=32", "width=48", f"out={tmp_path / 'images'}"]
    assert launch(["generate", f"from={run}", *asked]) == 0
    assert len(list((tmp_path / "images").glob("0*.png"))) == 1
    assert launch(["export", f"from={run / 'export'}", "format=diffusers", "dtype=bf16", f"out={tmp_path}"]) == 0
    written = load_file(tmp_path / UNET)
    first = load_file(run / "export" / "pipeline" / UNET)
    assert all(torch.equal(value, first[name].bfloat16()) for name, value in written.items())


def test_adapters_on_it_train_and_merge(run: Path, tmp_path: Path) -> None:
    parts = ("model.vae.weights=null", "model.text_encoder.weights=null")
    lora = train(
        tmp_path / "lora",
        *SD,
        "task=lora",
        *SHORT,
        f"model.weights={run}",
        "sample.every_steps=null",
        *parts,
    )
    assert all(row["grad_norm"] > 0 for row in read_metrics(lora))
    assert launch(["export", f"from={lora}", "format=kohya"]) == 0
    kohya = lora / "export" / "lora.kohya.safetensors"
    for name, source in (("one", lora), ("other", kohya)):
        assert launch(["merge", f"from={run}", f"lora={source}", f"out={tmp_path / name}"]) == 0
    merged, again = (load_file(tmp_path / name / UNET.name) for name in ("one", "other"))
    base = load_file(run / "export" / "pipeline" / UNET)
    moved = {name for name, value in merged.items() if not torch.equal(value, base[name])}
    assert moved
    assert all(".attn" in name for name in moved)
    assert all(torch.equal(again[name], value) for name, value in merged.items())
    kohya.unlink()
    assert launch(["export", f"from={lora}", "format=[kohya,comfyui]"]) == 2
    assert not kohya.exists(), "nothing is written where one format is refused"


def test_a_cache_trains_and_paints_as_its_pictures_do(run: Path, tmp_path: Path) -> None:
    common = (*SD, "task=finetune")
    assert launch(["cache", *common, "data.samples=12", f"out={tmp_path / 'cache'}"]) == 0
    cached = train(
        tmp_path / "cached",
        *common,
        *SHORT[:-1],
        "data=cached",
        f"data.path={tmp_path / 'cache'}",
        *("sample.every_steps=2", "sample.steps=2", "sample.count=2"),
    )
    painted = [np.asarray(Image.open(each / "samples" / "step_2" / "00_sample.png")) for each in (run, cached)]
    assert np.abs(painted[0].astype(int) - painted[1]).max() <= 1
    rows = [(row["loss"], row["grad_norm"]) for row in read_metrics(run)]
    assert [(row["loss"], row["grad_norm"]) for row in read_metrics(cached)] == [
        pytest.approx(row, rel=1e-5) for row in rows
    ]


def test_memory_is_computed_before_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["plan", "model=sd15", "task=finetune", "debug=random_weights", "train.global_batch_size=1"]) == 0
    said = capsys.readouterr().out
    assert "Finetune of StableDiffusion, 512 px, bf16" in said
    assert re.search(r"network +859,520,964 +859,520,964", said), said


def test_a_run_whose_text_tower_trained_paints_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    towers = ("model.text_encoder.train=true", "model.text_encoder.lr=0.5")
    run = train(tmp_path / "run", *SD, "task=finetune", *SHORT, *towers, "sample.every_steps=null")
    assert [(row["lr"], row["lr_text_encoder"]) for row in read_metrics(run)] == [(1e-3, 0.5)] * 2
    pipeline = StableDiffusionPipeline.from_pretrained(run / "export" / "pipeline")
    tower = find_model(str(run), key="from", part=None)
    with process_group() as world:
        stage = load_parts(tower, world).stage
    state = stage.text_encoder.module.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in pipeline.text_encoder.state_dict().items())
    begun = build_stage("sd_tiny").text_encoder.module.state_dict()
    assert sum(not torch.equal(value, state[name]) for name, value in begun.items()) > 20
    assert launch(["cache", *SD, "task=finetune", *towers, f"out={tmp_path / 'cache'}"]) == 2
    assert "something in model.text_encoder trains, but a cache would hold what it made at" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free"])
def test_a_tower_gets_and_loses_a_learning_rate_of_its_own_in_a_resume(optimizer: str, tmp_path: Path) -> None:
    """Of the network's value, so that a run that continues should be one that never stopped."""
    common = (*SD, "task=finetune", *SHORT, "model.text_encoder.train=true", "sample.every_steps=null")
    common = (
        *common,
        "train.max_steps=3",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=3",
        f"optimizer={optimizer}",
    )
    own, shared = "model.text_encoder.lr=1e-3", "model.text_encoder.lr=null"
    rows = {}
    for name, (first, then) in {"got": (shared, own), "lost": (own, shared)}.items():
        whole = train(tmp_path / name, *common, first)
        again = train(cut_back(whole, tmp_path / f"{name}_again", 2), *common, then)
        rows[name], rows[f"{name}_again"] = (read_metrics(run)[-1]["loss"] for run in (whole, again))
        exports = (load_file(run / "export" / "pipeline" / UNET) for run in (whole, again))
        assert all(torch.equal(*pair) for pair in zip(*(each.values() for each in exports), strict=True))
    assert len(set(rows.values())) == 1


def test_a_cache_holds_pictures_at_several_sizes(tmp_path: Path) -> None:
    model = (*untrained("sdxl_tiny"), "task=finetune")
    sizes = ("data=mixture", *(f"+data@data.sources.s{size}=shapes" for size in (32, 64)), "data.num_workers=0")
    sizes = (*sizes, "data.sources.s64.image_size=64", "data.sources.s32.samples=8", "data.sources.s64.samples=8")
    assert launch(["cache", *model, *sizes, f"out={tmp_path / 'cache'}"]) == 0
    common = (*SHORT[:-1], "train.max_steps=6", "sample.every_steps=null")
    runs = [train(tmp_path / "pictures", *model, *common, *sizes)]
    runs.append(train(tmp_path / "cached", *model, *common, "data=cached", f"data.path={tmp_path / 'cache'}"))
    first, second = ([row["loss"] for row in read_metrics(run)] for run in runs)
    assert first == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize("conditions", ["original", "target"])
def test_a_cache_of_sdxl_holds_all_shapes_and_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], conditions: str
) -> None:
    model = (*untrained("sdxl_tiny"), "task=finetune", f"model.size_conditions={conditions}")
    shapes = ("data.aspect_ratios=[2/1,3/2]", "data.buckets.multiple_px=8", "data.samples=24")
    cache = tmp_path / "cache"
    assert launch(["cache", *model, *shapes, "sample.negative_prompt=dull", f"out={cache}"]) == 0
    common = (*SHORT[:-1], "sample.steps=2", "sample.count=2", "sample.negative_prompt=dull", "sample.prompts=null")
    cached = train(tmp_path / "run", *model, *common, "data=cached", f"data.path={cache}", "sample.every_steps=2")
    pictures = train(tmp_path / "other", *model, *common, *shapes, "sample.every_steps=null")
    rows = [(row["loss"], row["grad_norm"]) for row in read_metrics(pictures)]
    assert [(row["loss"], row["grad_norm"]) for row in read_metrics(cached)] == [
        pytest.approx(row, rel=1e-5) for row in rows
    ]
    assert (cached / "samples" / "step_2" / "00_sample.png").is_file()
    given = [
        *SHORT[:-1],
        "data=cached",
        f"data.path={cache}",
        f"run.dir={tmp_path / 'refused'}",
        "sample.every_steps=null",
    ]
    other = {"original": "target", "target": "original"}[conditions]
    code = launch([*model[:-1], f"model.size_conditions={other}", *given, "sample.negative_prompt=dull"])
    assert code == (0 if other == "target" else 2)
    refused = "lacks time_ids, sizes and crops, which model.size_conditions=target does without: make a cache with"
    assert (refused in capsys.readouterr().err) == (other == "original")
    if other == "target":  # the squares are cropped, which it does not say
        assert read_metrics(tmp_path / "refused")[0]["loss"] != pytest.approx(rows[0][0], rel=1e-4)
