"""The command at the end of a run."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cascade_train.engine.run import on_end
from cascade_train.engine.run.on_end import run_end_hook

TELL = f'{sys.executable} -c "import json, os; print(json.dumps(dict(os.environ)))" > told; echo run >> times; exit 0'


def trainer(*, stopped=None, rank=0):
    return SimpleNamespace(world=SimpleNamespace(is_main=rank == 0), step=7, stopped=stopped)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def told():
    assert Path("times").read_text() == "run\n"
    environment = json.loads(Path("told").read_text())
    return {key.removeprefix("CASCADE_TRAIN_"): v for key, v in environment.items() if "CASCADE_TRAIN_" in key}


@pytest.mark.parametrize("stopped", [None, "Stopped by SIGTERM at step 7; saved."])
def test_a_run_that_ends_tells_its_command(tmp_path, stopped):
    assert on_end.SECONDS < 30.0, "less than launchers leave a rank"
    with run_end_hook(TELL, trainer(stopped=stopped), tmp_path):
        pass
    event, message = ("finished", "Finished at step 7.") if stopped is None else ("stopped", stopped)
    assert told() == {"EVENT": event, "RUN_DIR": str(tmp_path), "STEP": "7", "MESSAGE": message}


@pytest.mark.parametrize("error", [ValueError("api_key=hunter2 \0 is `date` \ud800"), KeyboardInterrupt()])
def test_a_failed_run_tells_its_command_and_fails_as_before(tmp_path, error):
    with pytest.raises(type(error)) as seen, run_end_hook(TELL, trainer(), tmp_path):
        raise error
    assert seen.value is error
    message = told()["MESSAGE"]
    assert told()["EVENT"] == "failed"
    assert message == (r"api_key=<redacted> \x00 is `date` \ud800" if str(error) else "KeyboardInterrupt")


def test_nothing_is_run_without_a_command_or_on_another_rank(tmp_path):
    with run_end_hook(None, trainer(), tmp_path), run_end_hook(TELL, trainer(rank=1), tmp_path):
        pass
    assert not Path("told").exists()


def test_the_command_is_no_rank_of_ours(tmp_path, monkeypatch):
    of_ranks = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"}
    for key in of_ranks:
        monkeypatch.setenv(key, "2")
    monkeypatch.setenv("KEPT", "yes")
    with run_end_hook("env > seen", trainer(), tmp_path):
        pass
    seen = {line.partition("=")[0] for line in Path("seen").read_text().splitlines()}
    assert "KEPT" in seen
    assert not of_ranks & seen


@pytest.mark.parametrize("command", ["exit 3", "/no/such/program", "echo \0"])
def test_a_command_that_fails_is_reported_and_changes_nothing(tmp_path, command, caplog):
    with run_end_hook(command, trainer(), tmp_path):
        pass
    assert "The command of run.on_end " in caplog.text


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(on_end, "SECONDS", 0.3)
    begun = time.monotonic()
    with run_end_hook("(sleep 60; touch late) & echo $! > child; wait", trainer(), tmp_path):
        pass
    assert time.monotonic() - begun < 10
    assert "was ended after 0 s" in caplog.text
    child = int(Path("child").read_text())
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if "Z" in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2][:3]:
            return
        time.sleep(0.05)
    pytest.fail("the child of the command is alive")


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_reminder_to_end_waits_for_the_command_and_ctrl_c_ends_it(tmp_path, number, ends):
    def send():
        while not Path("begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    with run_end_hook("touch begun; sleep 0.5; touch done", trainer(), tmp_path):
        pass
    thread.join()
    assert Path("done").exists() != ends
