"""Files of a run that are missing or damaged end in a sentence, in little memory.

Those of data and weights are in tests/unit/data/test_seen_data.py.
"""

from __future__ import annotations

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


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "other values": lambda path: path.write_bytes(b'{"step": [], "changes": 3, "keys": {}, "files": 7, "loss": "x"}\n'),
}
READ = ("start.json", "metrics.jsonl", "config.yaml", "checkpoints/step_2/manifest.json")


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


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", READ)
def test_a_run_with_a_damaged_file_is_looked_at_and_goes_on_or_says_why_not(command, name, how, capsys):
    damage(name, how)
    assert answered(["report", RUN], capsys) == (0 if name != "config.yaml" or Path(RUN, name).is_file() else 2)
    answered(["checkpoints", "ls", RUN], capsys)
    if how in ("cut", "other values"):
        answered(command, capsys)
