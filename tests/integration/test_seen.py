"""Files of a run that are missing, damaged or far too large end in a sentence, in little memory.

Those of data and weights are in tests/unit/data/test_seen_data.py.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cascade_train.__main__ import launch
from tests.integration.runs import NARROW, SMALL, train

SECONDS, BYTES = 120, 3 * 2**30  # the seconds only end a hang
RUN = "run"
MADE = (*NARROW, "task=finetune", "data.num_workers=0", "checkpoint.every_steps=2", "train.max_steps=2")


def huge(path: Path) -> None:
    os.truncate(path, 20 * 10**9) if path.exists() else path.touch()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def holding(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a pipe": replaced(os.mkfifo),
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),
    "20 GB": huge,
    "cut": cut,
    "empty": holding(b""),
    "a list": holding(b"[]"),
    "null": holding(b"null"),
    "an opened brace": holding(b"{"),
    "deep": holding(b"[" * 1000),
    "NUL": holding(b"\0" * 1000),
    "latin-1": holding('{"reason": "f\xfcr", "step": 1}\n'.encode("latin-1")),
    "other values": holding(b'{"step": [], "changes": 3, "keys": {}, "reason": 1, "files": 7, "loss": "x"}\n'),
    "huge losses": holding(b'{"step": 1, "loss": 1e308}\n' * 4000),
}
READ = (
    *("start.json", "metrics.jsonl", "environment.json", "config.yaml", "weights.json", "evaluation.jsonl"),
    *("config_history.jsonl", "rolled_back.jsonl", "stopped.json", "export/exported.json", "quarantine/rank_0.jsonl"),
    "checkpoints/step_2/manifest.json",
)
CONTINUED = ("metrics.jsonl", "config.yaml", "weights.json", "config_history.jsonl", "rolled_back.jsonl", READ[-1])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    return train(tmp_path_factory.mktemp("made") / RUN, *MADE)


@pytest.fixture
def command(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that continues the run; a copy of the run is in the current folder."""
    shutil.copytree(made, tmp_path / RUN)
    monkeypatch.chdir(tmp_path)
    return [*SMALL, *MADE, "train.max_steps=3", f"run.dir={RUN}"]


@pytest.fixture
def bounded() -> Iterator[None]:
    """End what takes too long, or too much memory, by an exception."""

    def end(*_: object) -> None:
        raise AssertionError(f"{SECONDS} s")  # no OSError, which would be taken for an answer

    before, limits = signal.signal(signal.SIGALRM, end), resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def damage(name: str, how: str) -> None:
    path = Path(RUN) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text('{"step": 2, "keys": ["a"], "reason": "x"}\n')
    DAMAGE[how](path)


def answered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Return the exit code of a command that says what is wrong, if anything, in sentences."""
    code = launch(arguments)
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out, said.err
    assert code in (0, 1, 2)
    assert code == 0 or said.err.strip()
    return code


@pytest.mark.usefixtures("command", "bounded")
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", READ)
def test_a_run_with_a_damaged_file_is_still_looked_at(name: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage(name, how)
    assert answered(["report", RUN], capsys) == (0 if name != "config.yaml" or Path(RUN, name).is_file() else 2)
    answered(["checkpoints", "ls", RUN], capsys)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("how", ["a pipe", "20 GB", "cut", "other values"])
@pytest.mark.parametrize("name", CONTINUED)
def test_a_run_with_a_damaged_file_goes_on_or_says_why_not(command, name, how, capsys):
    damage(name, how)
    answered(command, capsys)


@pytest.mark.usefixtures("command", "bounded")
def test_a_name_with_a_nul_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert answered(["report", "runs/\0"], capsys) == 2
    shutil.rmtree(RUN)
    assert answered(["report", RUN], capsys) == 2
