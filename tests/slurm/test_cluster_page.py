"""What docs/cluster.md shows is valid, and does what it says where stand-ins note how they were called."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from cascade_train.__main__ import launch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with stand-ins for the programs of a cluster."""
    (tmp_path / "stand_ins").mkdir()
    for name in ("apptainer", "sbatch", "srun", "scontrol"):
        program = tmp_path / "stand_ins" / name
        program.write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >> "{tmp_path}/called"\necho 17\n')
        program.chmod(0o755)
    (tmp_path / "sbatch").mkdir()
    (tmp_path / "sbatch" / "env.sh").touch()
    return tmp_path


def block(beginning: str) -> str:
    (found,) = [each for each in BLOCKS if beginning in each]
    return found


def called(folder: Path, script: str, *arguments: str, **environment: str) -> list[str]:
    """Run a script with the stand-ins first on the PATH and return what they were called with."""
    path = f"{folder / 'stand_ins'}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euc", script, "bash", *arguments]
    subprocess.run(command, cwd=folder, env={**os.environ, **environment, "PATH": path}, check=True, timeout=120)
    return (folder / "called").read_text().splitlines()


def test_every_block_is_valid_bash():
    assert len(BLOCKS) >= 9
    for text in BLOCKS:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=120)


def test_python_of_an_image_gets_the_arguments_of_the_run(folder: Path):
    script = f"{block('apptainer exec')}\n{block('CASCADE_IMAGE=')}\npython -m cascade_train 'run.name=a b'"
    words = called(folder, script)
    assert words[:4] == ["apptainer", "exec", "--nv", "--bind"]
    assert words[words.index("python") :] == ["python", "-m", "cascade_train", "run.name=a b"]
    assert words[words.index("python") - 1] == str(folder / "cascade.sif")


@pytest.mark.parametrize("launcher", ["torchrun", "bash"])
def test_other_launchers_get_the_overrides(folder: Path, launcher: str):
    script = block({"torchrun": "srun torchrun", "bash": "accelerate launch"}[launcher])
    words = called(folder, script, "run.name=a b", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="17", SLURM_JOB_NODELIST="n")
    assert words[-1] == "run.name=a b"
    assert "srun" in words
    assert launcher in words


def test_later_jobs_depend_on_the_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = called(folder, block("--dependency"))
    assert words.count("--dependency=afterok:17") == words.count("--kill-on-invalid-dep=yes") == 2
    start = words.index("sbatch/train.sbatch") + 1
    overrides = words[start : words.index("sbatch", start)]
    monkeypatch.chdir(folder)
    assert launch(["--cfg", "job", *overrides]) == 0, capsys.readouterr().err
    for wrapped in (word for word in words if word.startswith(". ")):
        subprocess.run(["bash", "-n"], input=wrapped, text=True, check=True, timeout=120)
