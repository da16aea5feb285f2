"""The real command line in process, with a stand-in for what trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig

from cascade_train.config.launch import compose_and_run


@pytest.fixture
def trained() -> list[DictConfig]:
    """Return the configurations that reached the training, which here does nothing."""
    return []


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

    def run(*argv: str, train: Callable[[DictConfig], int] = lambda cfg: trained.append(cfg) or 0) -> tuple[int, str]:
        code = compose_and_run(argv, train)
        return code, capsys.readouterr().err

    return run
