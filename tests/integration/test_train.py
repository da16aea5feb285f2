"""What a run leaves, what may follow it, and that batches may be cut in any way."""

import json
import logging
import re
import traceback
import warnings

import pytest
import torch

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from cascade_train.distributed import parallelize
from cascade_train.engine.checkpoint.folder import read_manifest
from tests.integration.runs import NARROW, SMALL, exported_weights, read_metrics, train
from tests.unit.engine.run.report_page import Page, write_lines

pytestmark = pytest.mark.slow

EVERYTHING = (
    *NARROW,
    "task=finetune",
    "ema.decay=0.9",
    "validate.share=0.2",
    "validate.every_steps=2",
    "validate.samples=8",
    "validate.logsnr=[-2,2]",
    "sample.every_steps=2",
    "sample.count=2",
    "sample.steps=3",
    "tracker=tensorboard",
)

QUICK = (*SMALL_NETWORK, "task=finetune", "optimizer.lr=1e-2")
"""Its last layer is far from zero after the first step, so that what lies in front of it has gradients."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finetune run of four steps with everything switched on."""
    return train(tmp_path_factory.mktemp("runs") / "base", *EVERYTHING)


def test_few_frames_lie_between_the_command_and_the_update(tmp_path, monkeypatch):
    found: list[str] = []
    step = torch.optim.AdamW.step

    def noting(*args, **kwargs):
        if not found:
            stack = traceback.extract_stack()
            found.extend(frame.name for frame in stack if "/src/cascade_train/" in frame.filename)
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    train(tmp_path / "run", *NARROW, "task=finetune", "train.max_steps=1")
    assert found[0] == "launch", "which main calls"
    assert found[-2:] == ["train_step", "update"]
    assert len(found) <= 10


def test_a_run_leaves_what_it_promises(finished):
    first, *rows = read_metrics(finished, first=0)
    assert (first["step"], first["samples_seen"], first["validate/loss"]) == (0, 0, first["validate_ema/loss"])
    assert {name.partition("/")[0] for name in first} == {"step", "samples_seen", "validate", "validate_ema"}
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["samples_seen"] for row in rows] == [8, 16, 24, 32]
    assert all({"loss", "loss_raw", "grad_norm", "lr"} <= row.keys() for row in rows)
    assert {"validate/loss", "validate_ema/loss"} <= rows[1].keys()
    for row, has_curve in ((first, True), (rows[1], False), (rows[3], True)):
        assert ("validate/loss_logsnr_-2" in row) == ("validate_ema/loss_logsnr_2" in row) == has_curve
    assert "torch" in json.dumps(json.loads((finished / "environment.json").read_text()))
    assert "_target_: cascade_train.tasks.finetune.Finetune" in (finished / "config.yaml").read_text()
    for step in (2, 4):
        assert (finished / "checkpoints" / f"step_{step}" / "manifest.json").is_file()
        pictures = sorted(path.name for path in (finished / "samples" / f"step_{step}").iterdir())
        samples = ["00_ema_sample.png", "00_sample.png", "01_ema_sample.png", "01_sample.png"]
        assert pictures == [*samples, "grid.png", "loss_by_logsnr.png"]
    first = sorted(path.name for path in (finished / "samples" / "step_0").iterdir())
    assert first == [*sorted([*samples, "00_original.png", "01_original.png"]), "grid.png"]
    assert (finished / "loss.png").is_file()
    assert len(list(finished.rglob("events.out.tfevents*"))) >= 1


def test_a_run_leaves_a_page_with_its_numbers_samples_and_settings(finished):
    page = Page((finished / "report.html").read_text())
    (run,) = page.data["runs"]
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    for name, curve in run["series"].items():
        logged = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        assert list(zip(curve["x"], curve["y"], strict=True)) == logged, name
    assert {"loss", "lr", "grad_norm", "images_per_second", "validate_ema/loss_logsnr_2"} <= run["series"].keys()
    found = page.data["samples"]
    assert found["labels"] == ["step 0", "step 2", "step 4"]
    assert [list(row["pictures"]) for row in found["rows"]] == [["ema_sample", "original", "sample"]] * 2
    assert all(row["caption"] for row in found["rows"])
    assert [each["label"] for each in page.data["noise_levels"]] == ["step 2", "step 4"]
    (difference,) = page.data["differences"]
    assert difference["base"] == "model=c_tiny task=finetune tracker=tensorboard"
    assert ["ema.decay", None, 0.9, True] in difference["rows"]
    assert all(row[0].startswith(("train.", "sample.", "data.", "model.")) for row in difference["rows"] if not row[3])
    assert page.data["state"] == {"kind": "finished", "text": "Finished at step 4."}
    assert page.refers == []


def test_the_best_run_of_a_sweep_is_promoted_as_export_writes_it(finished, tmp_path):
    good = {
        "overrides": json.loads((finished / "start.json").read_text())["overrides"],
        "run_dir": str(finished),
        "exit_code": 0,
        "metrics": {"step": 4},
        "values": {"loss": 1.0},
    }
    write_lines(
        tmp_path / "results.jsonl", [{**good, "run_dir": str(tmp_path / "none"), "values": {"loss": 2.0}}, good]
    )
    assert launch(["report", str(tmp_path), f"promote={tmp_path / 'best'}"]) == 0
    for path in (finished / "export" / "prior").rglob("*.safetensors"):
        copy = tmp_path / "best" / path.relative_to(finished / "export")
        assert copy.read_bytes() == path.read_bytes()
    assert (tmp_path / "best/config.yaml").is_file()


def test_diffusers_loads_the_export_and_samples_from_it(finished):
    from diffusers import StableCascadePriorPipeline

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers marks its own pipeline as deprecated
        pipeline = StableCascadePriorPipeline.from_pretrained(finished / "export" / "prior")
        pipeline.set_progress_bar_config(disable=True)
        latent = pipeline("a red circle", height=96, width=96, num_inference_steps=2).image_embeddings
    assert latent.shape == (1, 16, 3, 3)
    assert latent.isfinite().all()


def test_a_finished_run_says_so_and_changes_nothing(finished, caplog):
    before = (finished / "metrics.jsonl").read_bytes()
    with caplog.at_level(logging.INFO, "cascade_train"):
        assert launch([*SMALL, *EVERYTHING, f"run.dir={finished}"]) == 0
    assert "is finished" in caplog.text
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_start_reports_what_runs(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cascade_train")
    batch = ["train.global_batch_size=8", "train.micro_batch_size=2", "train.max_steps=1"]
    train(tmp_path / "run", "task=lora", "data.samples=80", "validate.share=0.1", *batch)
    (told,) = [message for message in caplog.messages if message.startswith("  device")]
    lines = dict(line.strip().split(maxsplit=1) for line in told.splitlines()[:-1])
    assert lines["device"] == "1 x cpu, parallel=single; fp32"
    assert lines["batch"] == "8 = 2 per micro-batch x 4 accumulated x 1 rank"
    assert re.fullmatch(r"[\d,]+ of [\d,]+ parameters \(LoRA on StageC: 32 adapted layers of rank 4\)", lines["trains"])
    training, held_out = map(int, re.fullmatch(r"(\d+), (\d+) held out", lines["samples"]).groups())
    assert training + held_out == 80
    assert re.fullmatch(r"1 steps, 0\.1\d* epochs of (8|9) steps", lines["length"])
    assert told.splitlines()[-1] == f"  writes to  {tmp_path / 'run'}"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A run of four steps that others are to equal."""
    return train(tmp_path_factory.mktemp("quick") / "run", *QUICK)


def test_raising_the_limit_continues_a_finished_run(quick, tmp_path):
    short = train(tmp_path / "run", *QUICK, "train.max_steps=2")
    train(short, *QUICK, "train.max_steps=4")
    assert read_metrics(short) == read_metrics(quick)
    page = Page((short / "report.html").read_text())
    assert page.data["runs"][0]["series"]["loss"]["x"] == [1, 2, 3, 4]
    assert page.data["notes"][0]["text"].startswith("Continued at step 2, ")


def test_a_run_of_another_config_is_not_touched(finished, capfd):
    before = (finished / "metrics.jsonl").read_bytes()
    assert launch([*SMALL, *EVERYTHING, f"run.dir={finished}", "run.seed=5", "data.samples=32"]) == 2
    said = capfd.readouterr().err
    assert "data.samples" in said
    assert "run.name" in said
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_lora_on_a_run_changes_nothing_but_adapters(finished, tmp_path):
    from safetensors.torch import load_file

    narrow = (*NARROW, f"model.weights={finished}")
    lora = train(tmp_path / "lora", *narrow, "task=lora", "optimizer.lr=1e-2", "task.rank=2")
    adapters = load_file(lora / "export" / "lora" / "adapter_model.safetensors")
    assert len(adapters) == 4 * 4 * 2, "two matrices for q, k, v and out of four blocks"
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in adapters)
    assert all(value.abs().max() > 0 for name, value in adapters.items() if "lora_B" in name)
    assert (lora / "export" / "lora" / "adapter_config.json").is_file()
    assert read_metrics(lora)[0]["loss"] != read_metrics(finished)[0]["loss"]


def test_accumulating_gives_the_same_weights(tmp_path):
    whole = train(tmp_path / "whole", *SMALL_NETWORK, "task=finetune")
    parts = train(tmp_path / "parts", *SMALL_NETWORK, "task=finetune", "train.micro_batch_size=2")
    for one, four in zip(read_metrics(whole), read_metrics(parts), strict=True):
        assert one == pytest.approx(four, rel=1e-4)
    others = exported_weights(parts)
    for name, weight in exported_weights(whole).items():
        torch.testing.assert_close(weight, others[name], rtol=1e-3, atol=1e-5, msg=name)


def test_equal_runs_are_equal_bit_for_bit_whatever_the_workers(quick, tmp_path):
    helped = train(tmp_path / "helped", *QUICK, "data.num_workers=2")
    assert read_metrics(quick) == read_metrics(helped)
    others = exported_weights(helped)
    assert all(torch.equal(weight, others[name]) for name, weight in exported_weights(quick).items())


def test_one_rank_has_the_numbers_of_a_sharded_network_to_the_bit(tmp_path, monkeypatch):
    more = ("train.precision=bf16", "activation_checkpointing=true", "ema.decay=0.5")
    given = (*QUICK, "train.max_steps=2", "train.micro_batch_size=4", "train.max_grad_norm=0.01", *more)
    plain = train(tmp_path / "plain", *given)
    monkeypatch.setattr(parallelize, "is_whole", lambda *_: False)
    wrapped = train(tmp_path / "wrapped", *given)
    assert read_metrics(plain) == read_metrics(wrapped)
    saved = [read_manifest(run / "checkpoints" / "step_2").files["__0_0.distcp"].sha256 for run in (plain, wrapped)]
    assert saved[0] == saved[1]


def test_recomputing_activations_changes_no_number(quick, tmp_path):
    recomputed = train(tmp_path / "recomputed", *QUICK, "activation_checkpointing=true")
    for one, other in zip(read_metrics(quick), read_metrics(recomputed), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_sweep_trains_each_of_its_runs_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = [*SMALL_NETWORK, "run.name=sweep", "task=finetune", "optimizer.lr=1e-4,1e-5", "train.max_steps=1"]
    assert launch(["--multirun", *[each for each in SMALL if "max_steps" not in each], *sweep]) == 0
    runs = sorted((tmp_path / "multirun" / "sweep").glob("lr=*"))
    assert len(runs) == 2
    assert {row["lr"] for run in runs for row in read_metrics(run)} == {1e-4, 1e-5}
