"""The wheel holds all that a run needs, and works from any folder. Built and installed without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

COMPOSE = ("--cfg", "job", "task=lora", "model=c_tiny")
SECONDS = 240


@dataclass(frozen=True)
class Installation:
    """A venv with the wheel in it, which sees the other packages of the set-up, and a folder far from the checkout."""

    python: Path
    elsewhere: Path

    def run(self, *command: str) -> str:
        """Run a command of this installation; return what it printed."""
        done = subprocess.run(
            command, cwd=self.elsewhere, env=clean_environment(), capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def clean_environment() -> dict[str, str]:
    """Return the environment without what could lead Python back to the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = ["-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    done = subprocess.run([sys.executable, *build], cwd=repository, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    root = tmp_path_factory.mktemp("installed")
    python = root / "venv" / "bin" / "python"
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "venv")], check=True)
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run([sys.executable, *install], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    (site_packages,) = (root / "venv" / "lib").glob("python*/site-packages")
    # A path file in a folder that a path file adds is not read: the editable install stays out of sight.
    (site_packages / "of_the_set_up.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installation(python, elsewhere)


def test_wheel_holds_the_configuration_and_the_tokenizer(wheel: Path, repository: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    conf = {f"cascade_train/{path.relative_to(repository)}" for path in (repository / "conf").rglob("*.yaml")}
    package = repository / "src"
    beside_code = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert len(conf) >= 15
    assert beside_code, "the tokenizer's files lie beside the code"
    assert conf | beside_code <= inside
    assert not [name for name in inside if "__pycache__" in name or name.startswith("tests")]


def test_wheel_is_what_runs(installation: Installation) -> None:
    found = installation.run(str(installation.python), "-c", "import cascade_train; print(cascade_train.__file__)")
    assert Path(found.strip()).is_relative_to(installation.python.parents[1])


def test_python_module_composes_from_another_folder(installation: Installation) -> None:
    printed = installation.run(str(installation.python), "-m", "cascade_train", *COMPOSE)
    assert "name: lora-c_tiny" in printed or "global_batch_size" in printed
    assert not list(installation.elsewhere.iterdir()), "showing a configuration leaves nothing behind"


def test_console_script_composes_from_another_folder(installation: Installation) -> None:
    script = installation.python.parent / "cascade-train"
    assert installation.run(str(script), *COMPOSE) == installation.run(
        str(installation.python), "-m", "cascade_train", *COMPOSE
    )


@pytest.mark.slow
def test_torchrun_composes_from_another_folder(installation: Installation) -> None:
    torchrun = [str(installation.python), "-m", "torch.distributed.run", "--nproc_per_node", "1"]
    printed = installation.run(*torchrun, "-m", "cascade_train", *COMPOSE)
    assert printed == installation.run(str(installation.python), "-m", "cascade_train", *COMPOSE)
