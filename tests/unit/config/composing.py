"""Composes configurations without the command line."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from cascade_train.config.launch import compose_root
from cascade_train.config.preflight import preflight


def composed(*overrides: str, extra: Path | None = None) -> DictConfig:
    """Return the root configuration of some overrides, not resolved; `extra` is one more folder of groups."""
    more = [] if extra is None else [f"hydra.searchpath=[file://{extra}]"]
    return compose_root([*overrides, *more])


def checked(*overrides: str, ranks: int = 1, extra: Path | None = None) -> DictConfig:
    """Return the preflighted configuration of some overrides."""
    return preflight(composed(*overrides, extra=extra), ranks=ranks)
