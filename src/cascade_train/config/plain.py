"""A configuration as plain values, for what is saved, shown or compared."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a config as plain values, interpolations resolved, enums by their names."""
    plain = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    if not isinstance(plain, dict):
        raise AssertionError("the root config is a mapping")
    return {str(key): value for key, value in plain.items()}
