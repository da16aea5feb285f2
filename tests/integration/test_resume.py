"""A run that is killed and continued equals one that never stopped."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.integration.runs import SMALL, exported_weights, read_metrics, train

KILLED_IN_STEP = 4
SCRIPT = f"""
import os, signal, sys
from cascade_train.engine.loop import Trainer

train_step = Trainer.train_step

def killed(self, micro_batches):
    if self.step + 1 == {KILLED_IN_STEP}:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, micro_batches)

Trainer.train_step = killed
from cascade_train.__main__ import launch
sys.exit(launch(sys.argv[1:]))
"""
LONG = ("task=finetune", "train.max_steps=8", "ema.decay=0.9", "objective=adaptive", "train.micro_batch_size=4")


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_after_step_three_of_eight_and_continued_gives_the_same_run(tmp_path, workers):
    overrides = [*LONG, f"data.num_workers={workers}"]
    whole = train(tmp_path / "whole", *overrides)
    killed = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *SMALL, *overrides, f"run.dir={killed}"],
        env=dict(os.environ),
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not (killed / "export").exists()
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == ["step_2"]
    train(killed, *overrides)
    assert read_metrics(killed) == read_metrics(whole)
    weights = exported_weights(killed)
    assert all(torch.equal(weight, weights[name]) for name, weight in exported_weights(whole).items())


def test_the_newest_checkpoint_that_verifies_is_taken(tmp_path, caplog):
    whole = train(tmp_path / "whole", "task=finetune", "train.max_steps=6", "checkpoint.keep_last=null")
    run = train(tmp_path / "run", "task=finetune", "checkpoint.keep_last=null")
    damaged = next(path for path in (run / "checkpoints" / "step_4").iterdir() if path.suffix == ".distcp")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    train(run, "task=finetune", "train.max_steps=6", "checkpoint.keep_last=null")
    assert damaged.name in caplog.text
    assert read_metrics(run) == read_metrics(whole)


def test_a_new_run_starts_from_a_named_checkpoint(tmp_path):
    origin = train(tmp_path / "origin", "task=finetune", "checkpoint.keep_last=null")
    step_2 = origin / "checkpoints" / "step_2"
    branch = train(tmp_path / "branch", "task=finetune", f"run.resume={step_2}", "run.name=branch")
    assert [row["step"] for row in read_metrics(branch)] == [3, 4]
    assert read_metrics(branch) == read_metrics(origin)[2:]


def test_lora_with_dropout_continues_exactly(tmp_path):
    overrides = ["task=lora", "task.dropout=0.5", "task.rank=2"]
    whole = train(tmp_path / "whole", *overrides)
    train(tmp_path / "parts", *overrides, "train.max_steps=2")
    parts = train(tmp_path / "parts", *overrides)
    assert read_metrics(parts) == read_metrics(whole)
