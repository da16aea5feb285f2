"""Stop signals where nobody listens: a closed terminal or pipe, and data that never come. Real processes."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.integration.runs import read_metrics
from tests.integration.test_early_stop import RUN, trains
from tests.slurm.cluster import wait_for

pytestmark = pytest.mark.slow

LONG = ("train.max_steps=1000000", "checkpoint.every_steps=null", "log.every_steps=1")
SHORT = ("train.max_steps=60", "log.every_steps=1")


def start_on_terminal(folder: Path, *overrides: str, is_own: bool) -> tuple[subprocess.Popen[bytes], int]:
    """Start a run on a new terminal; `is_own`: closing it sends SIGHUP. Also returns the other end of the terminal."""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    command = [sys.executable, "-m", "cascade_train", *RUN, *overrides]

    def begin() -> None:
        if is_own:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), end)
    process = subprocess.Popen(command, cwd=folder, start_new_session=True, preexec_fn=begin, **streams)
    os.close(end)
    return process, terminal


def test_a_closed_terminal_saves_and_stops_the_run(tmp_path: Path):
    process, terminal = start_on_terminal(tmp_path, *LONG, is_own=True)
    wait_for(lambda: trains(tmp_path))
    os.close(terminal)
    assert process.wait(timeout=120) == 75
    step = read_metrics(tmp_path / "run")[-1]["step"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{step}"]


def test_a_run_whose_terminal_is_gone_trains_to_its_end(tmp_path: Path):
    process, terminal = start_on_terminal(tmp_path, *SHORT, is_own=False)
    wait_for(lambda: trains(tmp_path))
    os.close(terminal)
    assert process.wait(timeout=120) == 0
    assert read_metrics(tmp_path / "run")[-1]["step"] == 60


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU, signal.SIGQUIT])
def test_a_signal_whose_output_nobody_reads_saves_and_stops(tmp_path: Path, number: signal.Signals):
    command = [sys.executable, "-m", "cascade_train", *RUN, *LONG]
    reader, writer = os.pipe()
    streams = {"stdout": writer, "stderr": writer}
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"}, **streams)
    os.close(writer)
    wait_for(lambda: trains(tmp_path))
    os.close(reader)  # as `… | head` does
    process.send_signal(number)
    assert process.wait(timeout=120) == 75
    assert (tmp_path / "run" / "stopped.json").is_file()


STUCK = """
import os, time
from cascade_train.data.shapes import Shapes

class Stuck(Shapes):
    def read(self, row):
        while os.path.exists("stuck"):
            time.sleep(0.1)
        return super().read(row)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_ends_a_wait_for_data_and_saves_the_steps_before(tmp_path: Path, workers: int):
    (tmp_path / "my_data.py").write_text(STUCK)
    own = ("data._target_=my_data.Stuck", "run.allowed_packages=[my_data,cascade_train,torch]")
    command = [sys.executable, "-m", "cascade_train", *RUN, *LONG, *own, f"data.num_workers={workers}"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: trains(tmp_path))
    (tmp_path / "stuck").touch()
    time.sleep(3.0)  # until what was prefetched is used up
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 75, said
    step = read_metrics(tmp_path / "run")[-1]["step"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{step}"]
    assert f"Stopped by SIGTERM at step {step}; saved" in said
