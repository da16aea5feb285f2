"""A LoRA with tokens, from end to end: training, resuming, painting, starting from it."""

import logging

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from cascade_train.commands.generate import GenerateArgs, generate
from tests.integration.runs import NARROW, read_metrics, train

pytestmark = pytest.mark.slow

TOKENS = 'task.train_tokens=[["[sides]","^left</w>"],["^(red|on|background)</w>",null]]'
LORA = (
    *("experiment=tiny_token", *NARROW, "run.name=run", TOKENS),
    *("sample.every_steps=4", "sample.steps=2", "sample.count=1"),
)
FULL = ("task.dora=true", "task.text_encoder_filters=[.self_attn]", "task.dropout=0.1", "ema.decay=0.5")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return train(tmp_path_factory.mktemp("base") / "run", *NARROW, "task=finetune", "optimizer.lr=3e-3")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return train(tmp_path_factory.mktemp("run") / "run", *LORA, *FULL, f"model.weights={base}")


def exported(directory):
    folder = directory / "export" / "lora"
    return load_file(folder / "adapter_model.safetensors") | load_file(folder / "tokens.safetensors")


def pixels(folder):
    with Image.open(folder / "00_00.png") as picture:
        return picture.tobytes()


def test_a_token_learns_from_the_captions_that_name_it(run):
    rows = exported(run)["token_rows"]
    assert rows.shape == (4, 128)
    moved = [(row - other).abs().max() for row, other in zip(rows, rows.roll(1, 0), strict=True)]
    assert all(distance > 0 for distance in moved)
    assert all(row["grad_norm"] > 0 for row in read_metrics(run))
    assert (run / "samples" / "step_4" / "grid.png").is_file()


def test_the_token_is_known_when_painting_and_to_a_run_that_starts_from_it(base, run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    generate(GenerateArgs(source=str(run), prompts=["a red circle at the [sides]"], out=str(out), steps=2))
    assert len(pixels(out)) == 96 * 96 * 3
    monkeypatch.chdir(run.parent)
    plain = [part for part in LORA if part != TOKENS]
    next_run = train(tmp_path / "next", *plain, *FULL, f"model.weights={base}", "task.weights=run", "optimizer.lr=1e-9",
                     "task.train_tokens=null", "ema.decay=null")  # fmt: skip
    for name, value in exported(run).items():
        torch.testing.assert_close(exported(next_run)[name], value, rtol=0, atol=1e-6, msg=name)
    monkeypatch.chdir(tmp_path)
    generate(
        GenerateArgs(
            source=str(next_run), prompts=["a red circle at the [sides]"], out=str(tmp_path / "again"), steps=2
        )
    )
    assert max(abs(a - b) for a, b in zip(pixels(out), pixels(tmp_path / "again"), strict=True)) <= 1


def test_cut_captions_are_reported_at_the_log_cadence(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    short = ("model.text_encoder.max_tokens=8", "log.every_steps=2", "train.max_steps=2")
    train(tmp_path / "run", *NARROW, "task=lora", *short)
    assert "captions were longer than 6 tokens and were cut" in caplog.text


def test_a_checkpoint_keeps_where_tokens_began(run, tmp_path):
    dcp_to_torch_save(run / "checkpoints" / "step_4", tmp_path / "state.pt")
    weights = torch.load(tmp_path / "state.pt", weights_only=True)["phases"]["train"]["weights"]
    table = "text_encoder.text_model.embeddings.token_embedding"
    assert {name for name in weights if table in name} == {f"{table}.start", f"{table}.shift"}
