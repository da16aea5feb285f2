"""The plan that users and programs read, of small networks with the names and keys of large ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cascade_train.__main__ import launch
from cascade_train.assembly.planning.plan import _kept
from tests.unit.config.composing import composed
from tests.unit.data import tars
from tests.unit.data.test_folder import write

SHALLOW = tuple(f"model.network.{way}_num_layers_per_block=[1,1]" for way in ("down", "up"))
TOWERS = tuple(f"model.{tower}.num_hidden_layers=1" for tower in ("text_encoder", "image_encoder"))


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert launch(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_a_recipe_is_planned_without_its_data_and_files(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = planned(capsys, "experiment=finetune_c_3b", "ranks=8", *SHALLOW, *TOWERS)
    assert "finetune_c_3b: Finetune of StageC, 768 px, bf16, parallel=fsdp" in text
    assert "Data     not opened" in text
    assert "Length   100,000 steps of 512: 51,200,000 samples" in text
    assert "6 checkpoints of" in text
    assert "8 x h100 at 40% of 989 TFLOP/s (assumed)" in text
    assert not list(tmp_path.iterdir())


def test_programs_read_the_same_in_bytes(capsys):
    arguments = ("experiment=controlnet_c_3b_identity", *SHALLOW, *TOWERS, "task.blocks=[0,3]", "device=rtx4090")
    found = json.loads(planned(capsys, *arguments, "json=true"))
    assert set(found["memory"]) == {"1", "2", "4", "8"}
    assert found["parameters"]["network"][1] == 0
    assert found["parameters"]["controlnet"][0] == found["parameters"]["controlnet"][1] > 0
    assert found["export_bytes"] == pytest.approx(4 * found["parameters"]["controlnet"][1], rel=0.01)
    assert sum(found["memory"]["1"].values()) > sum(found["memory"]["8"].values())
    assert found["fits"] < found["micro_batch_size"]["1"] == 256
    assert any(f"train.micro_batch_size={found['fits']} fits" in text for text in found["warnings"])


def test_the_data_is_looked_at_where_it_is(capsys, tmp_path: Path):
    data = tmp_path / "pictures"
    for number, caption in enumerate(("a picture", "star " * 90, "another")):
        write(data / f"{number}.png", tars.picture(64, 64, tint=number))
        write(data / f"{number}.txt", caption)
    arguments = ("task=lora", "model=c_tiny", "data=folder", f"data.path={data}", "data.caption_from=file")
    text = planned(capsys, *arguments, "train.global_batch_size=12", "train.max_epochs=4")
    assert "Data     3 samples, 4 epochs; 96x96: 3" in text
    assert "1 of 1 training sizes have fewer samples than a global batch of 12" in text
    assert "train.global_batch_size=12 cannot be split over 8 ranks." in text
    assert "Data     not opened\n" in planned(capsys, *arguments, "train.global_batch_size=12", "samples=false")
    long = ("model.text_encoder.long_captions=true", "train.max_epochs=4")
    text = planned(capsys, *arguments, *long, "train.global_batch_size=2")
    assert "Length   6 steps of 2: 12 samples\nData     3 samples, 4 epochs; 96x96: 3" in text
    assert launch(["inspect", *arguments, *long, f"out={tmp_path}/page.html"]) == 0
    assert "1 captions have more than 68 tokens, by the packaged tokenizer: " in capsys.readouterr().out


def test_checkpoints_in_epochs_are_counted_in_steps(capsys):
    own = ("task=lora", "model=c_tiny", "data.samples=24", "train.global_batch_size=8", "train.max_steps=12")
    rule = ("checkpoint.every_epochs=1", "checkpoint.keep_last=null")
    assert "4 checkpoints of" in planned(capsys, *own, *rule)
    text = planned(capsys, *own, *rule, "samples=false")
    assert "1 checkpoint of" in text
    assert "! checkpoint.every_epochs=1: its data is not known here; of the checkpoints one is counted." in text
    text = planned(capsys, *own, "checkpoint.every_epochs=1", "checkpoint.keep_last=3", "samples=false")
    assert "3 checkpoints of" in text
    assert "of the checkpoints all that may stay are counted." in text


@pytest.mark.slow
def test_what_lies_on_the_host_is_said(capsys):
    own = ("task=finetune", "model=c_tiny", "samples=false", "train.precision=bf16")
    waiting = "checkpoint.asynchronous=false"
    assert "Host" not in planned(capsys, *own, waiting)
    assert "GB of each rank: copies for asynchronous saves, and averages or weights" in planned(capsys, *own)

    def of(*more: str) -> float:
        found = json.loads(planned(capsys, *own, *more, "json=true"))
        return found["host_bytes"] / found["parameters"]["network"][1]

    offloaded, average = "parallel.cpu_offload=true", ("ema.decay=0.9", "ema.device=cpu")
    both = (*average, "ema.post_hoc=[0.1,0.2]", "checkpoint.keep_last=null")
    assert of(offloaded, waiting) == pytest.approx(16, rel=0.03), "fp32 weights, gradients and moments"
    assert of(offloaded) == pytest.approx(16 + 12, rel=0.03), "and copies of all but gradients"
    assert of(offloaded, "ranks=4") == pytest.approx(16 + 12 / 4, rel=0.03), "each rank writes its part"
    assert of(*average, waiting) == pytest.approx(4 + 4, rel=0.03), "the average, and the weights that update it"
    assert of(*both, waiting) == pytest.approx(3 * 4 + 2 * 4, rel=0.03)


def test_data_that_is_not_here_is_left_alone_and_what_that_means_is_said(capsys, tmp_path: Path):
    stores = ("data=mixture", "+data@data.sources.a=webdataset", "data.sources.a.urls=[s3://bucket/a.tar]")
    text = planned(capsys, "task=lora", "model=c_tiny", *stores, "train.max_epochs=2")
    assert "Data     not opened: it is not on this machine" in text
    assert "! train.max_epochs=2 may end the run before: its data is not known here." in text
    text = planned(capsys, "task=lora", "model=c_tiny", "data=folder", f"data.path={tmp_path / 'nowhere'}")
    assert f"Data     not opened: data.path={tmp_path / 'nowhere'} is not a folder" in text


def test_a_sweep_of_plans_prints_each_leaves_nothing_and_ends_with_the_first_that_is_refused(
    capsys, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    sweep = ("-m", "task=lora", "model=c_tiny", "samples=false")
    text = planned(capsys, *sweep, "train.global_batch_size=8,16")
    assert "steps of 8:" in text
    assert "steps of 16:" in text
    assert not list(tmp_path.iterdir())
    assert launch(["plan", *sweep, "train.global_batch_size=0,16"]) == 2
    assert "steps of 16:" not in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_checkpoints_that_stay_follow_the_rule_of_the_run():
    rule = ("task=lora", "model=c_tiny", "checkpoint.every_steps=10", "checkpoint.keep_every_steps=30")
    assert _kept(composed(*rule), 95) == (2, 2)
    assert _kept(composed(*rule, "checkpoint.keep_last=null"), 95) == (10, 0)
    assert _kept(composed(*rule, "checkpoint.keep_best=1", "checkpoint.best_metric=loss"), 95) == (2, 3)
    assert _kept(composed(*rule, "checkpoint.every_steps=null"), 95) == (1, 0)
    assert _kept(composed(*rule), 10**15) == (2, (10**15 - 20) // 30), "at once"


def test_a_run_is_planned_that_nothing_but_its_absent_data_ends(capsys):
    own = ("experiment=finetune_c_3b", "ranks=8", *SHALLOW, *TOWERS, "train.max_steps=null", "train.max_epochs=3")
    text = planned(capsys, *own)
    assert "Length   not known without its data, in steps of 512" in text
    assert " a step, on 8 x h100" in text
    assert "2 checkpoints of" in text
    assert "! train.max_epochs=3 ends the run, whose newest and best checkpoints are counted" in text


def test_a_run_that_nothing_ends_is_not_planned_either(capsys):
    own = ("experiment=sd_finetune", "model=sd_tiny", "model.image_size=32")
    assert launch(["plan", *own]) == 2
    assert "Nothing ends this run: set train.max_steps" in capsys.readouterr().err
    assert "Length   50 steps of 2" in planned(capsys, *own, "data.num_examples_to_see=100")
