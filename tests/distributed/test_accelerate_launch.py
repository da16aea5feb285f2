"""`accelerate launch` starts a run as torchrun does."""

from __future__ import annotations

import os
import subprocess

import pytest

from bench.soak_ranks import SMALL_NETWORK
from tests.integration.runs import SMALL, read_metrics, torchrun
from tests.warm.programs import warm_programs

pytestmark = pytest.mark.distributed


def test_accelerate_launch_equals_torchrun(tmp_path):
    overrides = [*SMALL, *SMALL_NETWORK, "task=finetune", "train.max_steps=2", "data.num_workers=0"]
    done = torchrun(2, *overrides, "run.dir=torchrun", cwd=tmp_path, warm=True)
    assert done.returncode == 0, done.stderr
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
