"""Composes configurations without the command line."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from cascade_train.config.groups import conf_dir
from cascade_train.config.hydra_compat import BASE
from cascade_train.config.launch import register_schema
from cascade_train.config.preflight import preflight


def composed(*overrides: str, extra: Path | None = None) -> DictConfig:
    """Return the root configuration of some overrides, not resolved; `extra` is one more folder of groups."""
    register_schema()
    more = [] if extra is None else [f"hydra.searchpath=[file://{extra}]"]
    with initialize_config_dir(str(conf_dir()), **BASE):
        cfg = compose("config", [*overrides, *more], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def checked(*overrides: str, ranks: int = 1, extra: Path | None = None) -> DictConfig:
    """Return the preflighted configuration of some overrides."""
    return preflight(composed(*overrides, extra=extra), ranks=ranks)
