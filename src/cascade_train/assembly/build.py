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
        cause, text = error.__cause__ or error, str(error)
    if not isinstance(cause, ValueError):
        raise cause  # here, not above, where it would become the context of its own cause
    below = text.rpartition("\nfull_key: ")[2] if "\nfull_key: " in text else ""
    place = below if below.startswith(key) else ".".join(filter(None, (key, below)))
    raise ConfigError(by_path(str(cause), place)) from cause
