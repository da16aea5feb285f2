"""Ranks of torchrun train what one rank trains, and `accelerate launch` starts a run as torchrun does."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

from bench.soak_ranks import SMALL_NETWORK
from tests.integration.runs import SMALL, exported_weights, read_metrics, torchrun, train
from tests.warm.programs import warm_programs

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_torchrun_equals_one_rank_and_accelerate_launch_torchrun(tmp_path):
    """Every mode and task on ranks that are cheaper to start: test_modes.py."""
    common = [*SMALL_NETWORK, "task=finetune", "train.max_steps=2", "data.num_workers=0", "ema.decay=0.9"]
    alone = train(tmp_path / "alone", *common)
    overrides = [*SMALL, *common, "parallel=hsdp"]
    done = torchrun(2, *overrides, "run.dir=torchrun", cwd=tmp_path, warm=True)
    assert done.returncode == 0, done.stderr
    for one, several in zip(read_metrics(alone), read_metrics(tmp_path / "torchrun"), strict=True):
        assert one == pytest.approx(several, rel=1e-5)
    weights = exported_weights(tmp_path / "torchrun")
    for name, weight in exported_weights(alone).items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-5, msg=name)
    command = [str(warm_programs() / "python"), "-m", "accelerate.commands.accelerate_cli", "launch"]
    flags = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    port = ["--main_process_port=0"]
    done = subprocess.run(
        [*command, *flags, *port, "-m", "cascade_train", *overrides, "tracker=tensorboard", "run.dir=accelerate"],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "accelerate") == read_metrics(tmp_path / "torchrun")
    assert list((tmp_path / "accelerate" / "tensorboard").glob("events*"))
