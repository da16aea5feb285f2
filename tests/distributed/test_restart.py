"""torchrun starts a run again by itself when a rank has died."""

import os
import subprocess

import pytest

from bench.soak_ranks import SMALL_NETWORK
from tests.integration.runs import SMALL, read_metrics, train
from tests.warm.programs import warm_programs

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LONG = (*SMALL_NETWORK, "task=finetune", "train.max_steps=6")
KILLED_ONCE = """
import os, signal, sys
from cascade_train.engine.loop import Trainer

train_step = Trainer.train_step

def killed(self, micro_batches):
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], self.world.rank, self.step) == ("0", 1, 4):
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, micro_batches)

Trainer.train_step = killed
from cascade_train.__main__ import launch
sys.exit(launch(sys.argv[1:]))
"""


def test_a_rank_that_dies_once_is_started_again_and_the_run_goes_on_from_its_checkpoint(tmp_path):
    (tmp_path / "killed_once.py").write_text(KILLED_ONCE)
    command = [str(warm_programs() / "torchrun"), "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, "killed_once.py", *SMALL, *LONG, "run.dir=run"],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Continuing at step" in done.stderr
    whole = read_metrics(train(tmp_path / "whole", *LONG))
    for one, several in zip(whole, read_metrics(tmp_path / "run"), strict=True):
        assert one == pytest.approx(several, rel=1e-4)
