"""The three ways in, as processes: what they answer without torch, how fast, and on which rank."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cascade_train.config.groups import commands
from tests.warm.programs import warm_programs

TINY = ("model=c_tiny", "task=lora")
SECONDS = 3.0
"""Of one core, so that a busy machine does not fail the test."""


def start(
    cwd: Path, *argv: str, flags: tuple[str, ...] = (), python: str | Path = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR"}}
    command = [str(python), *flags, "-m", "cascade_train", *argv]
    return subprocess.run(command, cwd=cwd, env={**env, **environment}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("--help",), 0),
        *(((name, "--help"), 0) for name in commands()),
        (("checkpoints", "ls", "nowhere"), 2),
        (("exprot", "from=x"), 2),
        (("--cfg", "job", *TINY), 0),
        (("--cfg", "job", "--resolve", *TINY), 0),
        (("--info", "defaults", *TINY), 0),
        ((*TINY, "train.max_stepz=3"), 2),
        ((*TINY, "train.precision=fp16"), 2),
        ((*TINY, "data.urls=[a-{0..5}.tar]"), 2),
        ((), 2),
    ],
)
def test_answers_without_importing_torch(tmp_path: Path, argv: tuple[str, ...], code: int):
    result = start(tmp_path, *argv, flags=("-X", "importtime"))
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert result.returncode == code
    assert "hydra" in imported
    heavy = {"torch", "diffusers", "transformers", "peft", "numpy", "PIL", "webdataset", "accelerate"}
    assert not imported & heavy
    assert list(tmp_path.iterdir()) == []


def test_showing_a_configuration_imports_no_checks(tmp_path: Path):
    """Beside `bench/start.py`: what Hydra alone would take, and a tenth more."""
    imported = start(tmp_path, "--cfg", "job", *TINY, flags=("-X", "importtime")).stderr
    assert "cascade_train.config.schema" in imported
    assert not [name for name in ("preflight", "components", "assembly", "config.help") if f"{name}\n" in imported]


@pytest.mark.parametrize("argv", [("--help",), ("--cfg", "job", *TINY), (*TINY, "train.max_stepz=3")])
def test_answers_within_three_seconds_of_work(tmp_path: Path, argv: tuple[str, ...]):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start(tmp_path, *argv)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 0.05 < after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < SECONDS


def test_help_shows_groups_and_keys_and_the_quoted_form(tmp_path: Path, repository: Path):
    text = start(tmp_path, "--help").stdout
    models = sorted(path.stem for path in (repository / "conf" / "model").glob("[!_]*.yaml"))
    assert {"c_tiny", "b_3b"} <= set(models)
    assert re.search(r"\n  model= +" + r",\s+".join(models) + r"\n", text)
    assert re.search(r"\n  train\.max_steps=10000 +Optimizer steps in all; null = no limit\.\n", text)
    assert """'data.urls="a-{000..005}.tar"'""" in text


def test_refusal_is_one_paragraph_on_rank_zero_and_silence_elsewhere(tmp_path: Path):
    python = warm_programs() / "python"  # that ranks refuse this takes torch
    first, second = (
        start(tmp_path, *TINY, "train.global_batch_size=8", python=python, RANK=rank, WORLD_SIZE="3") for rank in "01"
    )
    assert first.returncode == second.returncode == 2
    assert first.stderr.startswith("train.global_batch_size=8 cannot be split equally over 3 ranks")
    assert first.stderr.count("\n") == 1
    assert "6 or 9" in first.stderr
    assert (second.stdout, second.stderr) == ("", "")


def test_console_script_is_the_same_way_in(tmp_path: Path):
    script = Path(sys.executable).with_name("cascade-train")
    command = [script, "--cfg", "job", "--package", "run", "--resolve", *TINY]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "name: lora-c_tiny" in result.stdout


@pytest.mark.parametrize(("flags", "message"), [((), "Half does not define read"), (("-P",), "no module .* 'my_data'")])
def test_a_module_in_the_current_folder_is_found_by_the_console_script(
    tmp_path: Path, flags: tuple[str, ...], message: str
):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cascade-train").write_text("from cascade_train.__main__ import main\nmain()\n")
    source = "from cascade_train.data.source import Source\nclass Half(Source):\n    def open(self): ...\n"
    (tmp_path / "my_data.py").write_text(source)
    chosen = (*TINY, "data._target_=my_data.Half", "run.allowed_packages=[my_data,cascade_train,torch]")
    command = [sys.executable, *flags, "bin/cascade-train", *chosen]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert re.search(message, result.stderr)


LEFT = """
import atexit, sys
import torch.distributed as dist
from cascade_train import __main__ as entry

if sys.argv[1] == "in a group":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(print, "waits for others")
entry.launch = lambda argv: print("reported", end=" ") or 3
sys.argv[1:] = sys.argv[2:]
entry.main()
"""


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_process_that_an_error_left_in_its_group_ends_at_once(command: str):
    python = warm_programs() / "python"
    for group, output in (("in a group", "reported "), ("alone", "reported waits for others\n")):
        end = subprocess.run([python, "-c", LEFT, group, command], capture_output=True, text=True, check=False)
        assert (end.returncode, end.stdout) == (3, output), end.stderr
