"""The scripts that train the tiny models: in which order they start what, and that nothing outlives them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

STUB = """#!/usr/bin/env bash
trap 'echo "stopped $*" >>"$LOG"; exit 75' TERM
echo "$$ $*" >>"$LOG"
case "$*" in
  *"$FAILS"*) exit 3 ;;
  *"$STAYS"*) for _ in {1..300}; do sleep 0.1; done ;;
esac
"""
"""Stands for every program of a script: logs its arguments, then fails, stays for half a minute, or is done."""

SCRIPTS = {
    "tiny_stable_diffusion": ("experiment=tiny_vae", "dir=runs/tiny_sd/sdxl ", "dir=runs/tiny_sd/sd "),
    "tiny_cascade": ("experiment=tiny_a", "experiment=tiny_c ", "experiment=tiny_b run"),
}
"""Script -> in its calls: the first training, and the two that run side by side, that in the background first."""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(params=SCRIPTS)
def names(request: pytest.FixtureRequest) -> tuple[str, tuple[str, str, str]]:
    return request.param, SCRIPTS[request.param]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "calls"


@pytest.fixture
def start(names: tuple[str, tuple[str, str, str]], repository: Path, tmp_path: Path, log: Path) -> Iterator[Start]:
    """Yield what starts the script with stubs for its programs."""
    for folder in ("scripts", ".venv/bin", "runs/tiny"):
        (tmp_path / folder).mkdir(parents=True)
    script = Path(shutil.copy(repository / "scripts" / f"{names[0]}.sh", tmp_path / "scripts"))
    for program in ("torchrun", "python", "cascade-train"):
        (tmp_path / ".venv/bin" / program).write_text(STUB)
        (tmp_path / ".venv/bin" / program).chmod(0o755)

    started: list[subprocess.Popen[bytes]] = []

    def begin(*overrides: str, fails: str = "nothing", stays: str = "nothing") -> subprocess.Popen[bytes]:
        env = {**os.environ, "LOG": str(log), "FAILS": fails, "STAYS": stays}
        started.append(
            subprocess.Popen([script, *overrides], env=env, stdout=subprocess.DEVNULL, start_new_session=True)
        )
        return started[-1]

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def calls(log: Path) -> list[str]:
    """Return the arguments of the calls so far."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.partition(" ")[2] for line in lines if not line.startswith("stopped")]


def living(log: Path) -> list[str]:
    """Return the calls whose processes have not ended."""
    started = [line.partition(" ") for line in log.read_text().splitlines() if not line.startswith("stopped")]
    return [arguments for pid, _, arguments in started if Path(f"/proc/{pid}").exists()]


def test_every_program_gets_the_overrides_and_the_judge_comes_last(
    start: Start, names: tuple[str, tuple[str, str, str]], log: Path
) -> None:
    assert start("sample.prompts=[a b]").wait(timeout=60) == 0
    *programs, judge = calls(log)
    assert len(programs) == {"tiny_stable_diffusion": 6, "tiny_cascade": 7}[names[0]]
    assert [call for call in programs if not call.endswith("sample.prompts=[a b]")] == []
    assert judge.startswith(f"bench/{names[0]}.py")
    assert names[1][0] in programs[0]


@pytest.mark.parametrize(("fails", "stays"), [(1, 2), (2, 1)])
def test_a_training_that_fails_stops_the_one_beside_it(
    start: Start, names: tuple[str, tuple[str, str, str]], log: Path, fails: int, stays: int
) -> None:
    process = start(fails=names[1][fails], stays=names[1][stays])
    assert process.wait(timeout=60) == 3
    assert living(log) == []
    assert not calls(log)[-1].startswith("bench")
