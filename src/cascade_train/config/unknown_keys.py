"""What is answered to a key that the configuration does not have: the nearest key, or ours for another trainer's name.

The names of other trainers stand in unknown_keys.yaml. Nothing is translated: the answer names the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from cascade_train.config.components import unknown_hint
from cascade_train.config.groups import did_you_mean, group_options, groups, options_with
from cascade_train.config.help import meaning_of

_NAMES: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
OTHER_NAMES = {name: ours for ours, names in _NAMES.items() for name in names.split()}
"""What other trainers call a key -> ours, or a sentence."""


def unknown_key(path: str, cause: BaseException | None) -> str:
    """Return one paragraph on an unknown key and OmegaConf's error: the nearest key, an option that has it, or ours."""
    parent = getattr(cause, "parent_node", None)
    parts = path.split(".")
    known, prefix = _siblings(parent, parts)
    if prefix.count(".") >= len(parts):  # a mapping was given, and the unknown key is in that
        path = str(getattr(cause, "full_key", path))
        parts = path.split(".")
    root = parent._get_root() if isinstance(parent, DictConfig) else None
    return f"{path} is unknown.{_hint(path, parts, known, prefix, root)}"


def _hint(path: str, parts: list[str], known: list[str], prefix: str, root: Any) -> str:
    """Return the sentence with the remedy, from the most to the least certain."""
    beside = did_you_mean(parts[prefix.count(".")], known, prefix) if prefix else ""
    if prefix in {f"{group}." for group in groups()}:
        beside = unknown_hint(prefix[:-1], path.removeprefix(prefix), known)
    if beside.startswith(" It is a key of "):
        return beside
    if other := other_name(parts[-1], root):
        return other
    if beside.startswith(" Did you mean"):
        return beside
    paths = list(_paths(root)) if isinstance(root, DictConfig) else []
    same = [p for p in paths if p.rpartition(".")[2] == parts[-1]]
    if same:
        return f" Did you mean {' or '.join(same[:3])}?"
    return beside or did_you_mean(parts[0], sorted({*known, *groups()}))


def other_name(name: str, root: Any = None) -> str:
    """Return a sentence with our key for a name that other trainers use, and its meaning; empty where there is none."""
    ours = OTHER_NAMES.get(name.lower().lstrip("-").replace("-", "_"))
    if ours is None or " " in ours:
        return f" {ours}" if ours else ""
    group, _, key = ours.partition(".")
    plain: Any = OmegaConf.to_container(root, resolve=False) if isinstance(root, DictConfig) else {}
    meaning = meaning_of(ours, plain)
    options = [] if meaning or not key else options_with(group, key)
    if 0 < len(options) < len(group_options(group)):
        meaning = f"It is a key of {' and '.join(f'{group}={option}' for option in options)}"
    return f" Did you mean {ours}?{f' {meaning[0].upper()}{meaning[1:].rstrip(chr(46))}.' if meaning else ''}"


def _siblings(parent: Any, parts: list[str]) -> tuple[list[str], str]:
    """Return the keys beside the unknown one, and the path before them, with its dot."""
    if not isinstance(parent, DictConfig):
        return [], ""
    full = parent._get_full_key(None)
    keys = [str(key) for key in parent if str(key) != "hydra"]
    return keys, f"{full}." if full else ""


def _paths(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        path = f"{prefix}{key!s}"
        if path == "hydra":
            continue
        yield path
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _paths(child, f"{path}.")
