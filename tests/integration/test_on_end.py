"""The command of `run.on_end`, from the command line to what it was told."""

import pytest

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from cascade_train.config.saved import load_saved_config
from tests.integration.runs import SMALL

pytestmark = pytest.mark.slow

TELL = 'run.on_end="echo $CASCADE_TRAIN_EVENT $CASCADE_TRAIN_STEP $CASCADE_TRAIN_RUN_DIR >> told; : hunter2; exit 3"'


def run(folder, *overrides):
    common = [*SMALL, *SMALL_NETWORK, "task=finetune", "data.num_workers=0"]
    return launch([*common, f"run.dir={folder}", TELL, *overrides])


def test_a_run_that_stops_and_finishes_tells_its_command_each_time(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path / "run", "run.max_hours=1e-9") == 75
    assert run(tmp_path / "run", "run.max_hours=null", "train.max_steps=2") == 0
    assert (tmp_path / "told").read_text() == f"stopped 1 {tmp_path}/run\nfinished 2 {tmp_path}/run\n"
    assert caplog.text.count("The command of run.on_end ended with exit code 3.") == 2
    for file in ("config.yaml", "export/config.yaml", "config_history.jsonl"):
        text = (tmp_path / "run" / file).read_text()
        assert "hunter2" not in text
    assert "on_end: echo <redacted>" in (tmp_path / "run" / "config.yaml").read_text()
    assert load_saved_config(tmp_path / "run").run.on_end is None
    assert run(tmp_path / "run", "train.max_steps=2") == 0
    assert len((tmp_path / "told").read_text().splitlines()) == 2, "a finished run does nothing, and tells nobody"


def test_a_run_that_fails_tells_its_command_and_a_refused_one_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken = ["optimizer.lr=1e30", "train.max_grad_norm=null", "checkpoint.every_steps=null"]
    assert run(tmp_path / "run", *broken) == 1
    assert (tmp_path / "told").read_text().startswith("failed ")
    assert run(tmp_path / "other", "optimizer.lr=-1") == 2
    assert len((tmp_path / "told").read_text().splitlines()) == 1
