"""What the components of a configuration declare of their options, see cascade_train/options.py, and what follows.

Signatures are read from source: nothing is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from cascade_train.config.overrides import is_existing_path
from cascade_train.config.static.annotations import is_component
from cascade_train.config.static.signatures import read_signature
from cascade_train.config.static.static_source import UnreadableError
from cascade_train.errors import ConfigError

LOOP_FILES = ("ema.weights", "validate.lpips", "validate.rfid")
"""Options of the typed nodes that name files."""


class Option(NamedTuple):
    """One value of a configuration, with the roles of the option that holds it."""

    key: str
    value: Any
    roles: frozenset[str]


def declared_roles(node: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the roles of a component's options by name; empty for other nodes, and where the source cannot tell."""
    if not is_component(node):
        return {}
    try:
        parameters = read_signature(str(node["_target_"])).parameters
    except (ConfigError, UnreadableError):
        return {}
    return {name: parameter.roles for name, parameter in parameters.items()}


def component_options(
    node: Mapping[str, Any], prefix: str = "", roles: frozenset[str] = frozenset()
) -> Iterator[Option]:
    """Yield every value below a plain node by its dotted key; what lies below an option has its roles too."""
    declared = declared_roles(node)
    for name, value in node.items():
        key, found = f"{prefix}{name}", roles | declared.get(name, frozenset())
        if isinstance(value, Mapping) and value:
            yield from component_options(value, f"{key}.", found)
        else:
            yield Option(key, value, found)


def free_keys(config: Mapping[str, Any]) -> set[str]:
    """Return the keys of a plain root configuration that its components let a continued run change."""
    return {option.key for option in component_options(config) if "Free" in option.roles}


def make_absolute(cfg: DictConfig) -> None:
    """Make every existing path of a root configuration absolute, in place; hub ids and urls stay as they are."""
    for key, value, roles in list(component_options(OmegaConf.to_container(cfg))):  # type: ignore[arg-type]
        if "File" in roles or key in LOOP_FILES:
            OmegaConf.update(cfg, key, _absolute(value))


def _absolute(value: Any) -> Any:
    if isinstance(value, list):
        return [_absolute(each) for each in value]
    return str(Path(value).absolute()) if isinstance(value, str) and is_existing_path(value) else value
