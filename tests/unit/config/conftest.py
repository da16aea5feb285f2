"""The real command line in process, with a stand-in for what trains."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import DictConfig

from cascade_train.config.launch import launch

TINY = ("model=c_tiny", "task=lora")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[DictConfig]:
    """Return the configurations that reached `build.train`, which here does nothing."""
    reached: list[DictConfig] = []
    build: Any = ModuleType("cascade_train.build")
    build.train = lambda cfg: reached.append(cfg) or 0
    monkeypatch.setitem(sys.modules, "cascade_train.build", build)
    return reached


@pytest.fixture
def loggers() -> Iterator[None]:
    """Take away what Hydra's `--info` and the launch do to the root logger."""
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


@pytest.fixture
def start(
    trained: list[DictConfig],
    loggers: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a command line and returns its exit code and what it wrote to stderr."""
    for name in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[int, str]:
        code = launch(argv)
        return code, capsys.readouterr().err

    return run
