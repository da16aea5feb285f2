"""Make components of checked nodes, by Hydra; no other file of the library does. Imports no torch."""

from __future__ import annotations

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from cascade_train.config.components import by_path
from cascade_train.errors import ConfigError


def build_node(node: Any, key: str = "", **changed: Any) -> Any:
    """Instantiate a component with the components in its arguments, which arrive as plain lists, dicts and objects.

    Args:
        node: a checked node, plain or OmegaConf's; nodes below the root of a configuration may refer to other keys.
        key: where the node lies in the configuration, for messages.
        **changed: arguments in the place of the node's.

    Raises:
        ConfigError: a value that a constructor refuses, its argument named by the whole key.
    """
    cfg = node if isinstance(node, DictConfig) else OmegaConf.create(node)
    try:
        return instantiate(cfg, _convert_="all", **changed)
    except InstantiationException as error:
        if not isinstance(error.__cause__, ValueError):
            raise (error.__cause__ or error) from None
        below = str(error).rpartition("\nfull_key: ")[2] if "\nfull_key: " in str(error) else ""
        place = below if below.startswith(key) else ".".join(filter(None, (key, below)))
        raise ConfigError(by_path(str(error.__cause__), place)) from error.__cause__
