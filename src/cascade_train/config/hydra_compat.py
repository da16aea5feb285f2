"""What Hydra 1.3 and 1.4 ask for differently, in one place. Delete with the support of 1.3.

1.4 deprecates `version_base`, and instantiates what a configuration names only where code that is trusted listed it;
1.3 knows no such list. Ours is made of targets that preflight has checked already (static/targets.py, components.py).
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

HAS_WHITELIST = tuple(int(part) for part in importlib.metadata.version("hydra-core").split(".")[:2]) >= (1, 4)

BASE: dict[str, Any] = {} if HAS_WHITELIST else {"version_base": "1.3"}
"""Arguments of `hydra.main` and `initialize_config_dir` for the behaviour of 1.3."""

CALLBACKS: dict[str, Any] = {"execution_whitelist": "cascade_train.config.sweep.SweepResults"} if HAS_WHITELIST else {}
"""Arguments of `hydra.main` that let it make the callbacks of conf/config.yaml."""


def construct(node: DictConfig, **changed: Any) -> Any:
    """Construct a checked component node, `changed` instead of some of its arguments.

    Raises:
        InstantiationException: a constructor refused its arguments.
    """
    listed = {"_execution_whitelist_": sorted(_targets(node))} if HAS_WHITELIST else {}
    return instantiate(node, **changed, **listed, _convert_="all")


def _targets(value: Any) -> set[str]:
    """Return every `_target_` in a node."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, list):
        return {target for inner in value for target in _targets(inner)}
    if not isinstance(value, dict):
        return set()
    inside = {target for inner in value.values() for target in _targets(inner)}
    return inside | {value["_target_"]} if "_target_" in value else inside
