"""What is answered to a key that the configuration does not have: the nearest key, or ours for another trainer's name.

The names of other trainers stand in unknown_keys.yaml. Nothing is translated: the answer names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from cascade_train.config.components import unknown_hint
from cascade_train.config.groups import did_you_mean, group_options, groups, key_paths, options_with
from cascade_train.config.help import meaning_of

_NAMES: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
OTHER_NAMES = {name: ours for ours, names in _NAMES.items() for name in names.split()}
"""What other trainers call a key -> ours, or a sentence."""


def unknown_key(path: str, cause: BaseException | None) -> str:
    """Return one paragraph on an unknown key and OmegaConf's error: the nearest key, an option that has it, or ours."""
    parent = getattr(cause, "parent_node", None)
    if not isinstance(parent, DictConfig):
        return f"{path} is unknown.{other_name(path.rpartition('.')[2]) or did_you_mean(path, groups())}"
    known, node = [str(key) for key in parent if key != "hydra"], parent._get_full_key(None)
    if not path.startswith(f"{node}." * bool(node)):  # a mapping was given, and the unknown key is in that
        path = str(getattr(cause, "full_key", path))
    root: Any = parent._get_root()
    plain: Any = OmegaConf.to_container(root, resolve=False)
    rest = path.removeprefix(f"{node}." * bool(node))
    beside = did_you_mean(rest.partition(".")[0], known, f"{node}.") if node else ""
    if node in groups():
        beside = unknown_hint(node, rest, known)
    name = path.rpartition(".")[2]
    if not beside.startswith(" It is a key of "):
        near = beside if beside.startswith(" Did you mean") else ""
        same = [key for key in key_paths(plain) if key.rpartition(".")[2] == name and not key.startswith("hydra")]
        elsewhere = f" Did you mean {' or '.join(same[:3])}?" if same else ""
        anywhere = did_you_mean(path.partition(".")[0], sorted({*known, *groups()}))
        beside = other_name(name, plain) or near or elsewhere or beside or anywhere
    return f"{path} is unknown.{beside}"


def other_name(name: str, cfg: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return a sentence with our key for a name that other trainers use, and its meaning; empty where there is none."""
    ours = OTHER_NAMES.get(name.lower().lstrip("-").replace("-", "_"))
    if ours is None or " " in ours:
        return f" {ours}" if ours else ""
    group, _, key = ours.partition(".")
    meaning = meaning_of(ours, cfg)
    options = [] if meaning or not key else options_with(group, key)
    if 0 < len(options) < len(group_options(group)):
        meaning = f"It is a key of {' and '.join(f'{group}={option}' for option in options)}"
    return f" Did you mean {ours}?{f' {meaning[0].upper()}{meaning[1:].rstrip(chr(46))}.' if meaning else ''}"
