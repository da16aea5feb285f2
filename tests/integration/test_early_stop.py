"""Signals while a run starts: Python's imports, composing, building. Real processes where that is what is tested."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.soak_ranks import SMALL_NETWORK
from cascade_train.__main__ import launch
from tests.integration.runs import read_metrics
from tests.slurm.cluster import free_ports, wait_for
from tests.warm.programs import warm_programs

pytestmark = pytest.mark.slow

RUN = (*SMALL_NETWORK, "task=finetune", "train.global_batch_size=2", "sample.every_steps=null", "run.dir=run")
ENDLESS = ("train.max_steps=1000000", "checkpoint.every_steps=null")


def start(
    folder: Path, *overrides: str, python: str | Path = sys.executable, **environment: str
) -> subprocess.Popen[str]:
    command, whole = [str(python), "-m", "cascade_train", *RUN, *overrides], {**os.environ, **environment}
    return subprocess.Popen(
        command, cwd=folder, env=whole, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def listens(process: subprocess.Popen[str], number: int) -> bool:
    """Return whether a process handles a signal; before that the system ends it, whatever Python does."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def trains(folder: Path) -> bool:
    return (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks Linux which signals a process handles")
def test_handlers_are_set_before_anything_heavy_is_imported(tmp_path: Path):
    command = [sys.executable, "-X", "importtime", "-m", "cascade_train", "--info", "defaults"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    first = modules.index("cascade_train.signals")
    assert {"hydra", "omegaconf", "yaml"} <= set(modules[first:])
    assert not {"hydra", "omegaconf", "yaml", "argparse", "logging"} & set(modules[:first])


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks Linux which signals a process handles")
def test_a_signal_at_any_moment_of_a_start_ends_it_as_stopped_and_the_next_start_trains(tmp_path: Path):
    numbers, seconds = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT), 0.0
    for case, share in enumerate((None, 0.0, 0.2, 0.6)):
        folder, number = tmp_path / str(case), numbers[case]
        folder.mkdir()
        begun, process = time.monotonic(), start(folder, *ENDLESS)
        wait_for(lambda process=process, number=number: listens(process, number))
        if share is None:
            wait_for(lambda folder=folder: trains(folder))
            seconds = time.monotonic() - begun
        else:
            time.sleep(share * seconds)
        process.send_signal(number)
        said = process.communicate(timeout=120)[1]
        is_early = "before the first step" in said
        assert process.returncode == (130 if number == signal.SIGINT and is_early else 75), (share, said)
        assert f"Stopped by {number.name}" in said
        assert "Traceback" not in said
        assert "same command continues" in said
        assert is_early != (folder / "run").exists(), "a start that did no step leaves nothing"
        assert not list(folder.glob("**/.*.claim")) + list(folder.glob("**/.partial*"))
    trained = tmp_path / "0" / "run"
    steps = read_metrics(trained)[-1]["step"] + 1
    assert launch([*RUN, f"run.dir={trained}", f"train.max_steps={steps}"]) == 0
    assert read_metrics(trained)[-1]["step"] == steps


@pytest.mark.distributed
def test_a_rank_whose_rank_zero_is_killed_says_so_without_stacks_of_the_libraries(tmp_path: Path):
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    place |= {"python": warm_programs() / "python"}  # whose end ends the rank: tests/warm
    ranks = [start(tmp_path, *ENDLESS, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(2)]
    wait_for(lambda: trains(tmp_path))
    ranks[0].kill()
    (_, _), (_, said) = (rank.communicate(timeout=120) for rank in ranks)
    assert ranks[1].returncode == 1
    assert said.startswith("[rank 1] The connection to another rank was lost: "), said
    assert said.count("\n") == 1, said
