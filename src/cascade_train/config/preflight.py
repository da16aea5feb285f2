"""Refuse a configuration that cannot train, before anything heavy is imported."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf


def preflight(cfg: DictConfig) -> DictConfig:
    """Return the configuration with every interpolation resolved."""
    OmegaConf.resolve(cfg)
    return cfg
