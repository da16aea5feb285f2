"""An experiment made from another trainer's configuration: what it chooses and sets, and what was left behind.

What the keys of a trainer mean lives in official.py and open_diffusion.py, each with a YAML beside it. Nothing is
trained here, and no expression of a configuration is run.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cascade_train.config.arguments import parameters
from cascade_train.config.groups import conf_dir
from cascade_train.config.targets import import_target

DEFAULTS = {"data": "webdataset", "objective": "gdf"}
"""Options of groups that a recipe may leave out."""


@dataclass(kw_only=True)
class Recipe:
    """An experiment in the making.

    Attributes:
        groups: group -> option, in the order of the file.
        values: dotted key -> value.
        remarks: sentences about the whole, printed and written into the file.
        notes: source key -> why it has no equivalent, or what to do about it.
    """

    groups: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def take(self, given: Mapping[str, Any], table: Mapping[str, Any]) -> None:
        """Take over the values of keys that mean the same here, and note what is not read."""
        notes, read = table["notes"], set(table["read"])
        for key, value in given.items():
            if key in table["same"]:
                self.values[table["same"][key]] = value
            elif key not in read:
                node = key.partition(".")[0]
                self.notes[key if key in notes else node] = notes.get(key, notes.get(node, "has no equivalent"))

    def leave_out_unknown(self) -> None:
        """Move keys that the chosen components do not take to the notes."""
        for key in list(self.values):
            node = key.partition(".")[0]
            if not self._known(key):
                self.notes[key] = f"{self.values.pop(key)} is left out: {node}={self._option(node)} takes no such key"

    def _known(self, key: str) -> bool:
        """Return whether the component that a key goes to takes its first argument; typed nodes are checked later."""
        node, *rest = key.split(".")
        file = conf_dir() / node / f"{self._option(node)}.yaml"
        if not rest or not file.is_file():
            return True
        target = yaml.safe_load(file.read_text()).get("_target_")
        return target is None or rest[0] in parameters(import_target(target))[0]

    def _option(self, group: str) -> str:
        return self.groups.get(group, DEFAULTS.get(group, ""))

    def text(self, *, title: str, command: str) -> str:
        """Return the experiment's file: what it is, the command that runs it, its choices, its values, what is left."""
        choices = [{f"override /{group}": option} for group, option in self.groups.items()]
        body = {"defaults": choices} if choices else {}
        about = [line for remark in self.remarks for line in textwrap.wrap(remark, 118, break_long_words=False)]
        parts = ["# @package _global_\n", *(f"# {line}\n" for line in (title, command, *about)), _dump(body)]
        return "".join([*parts, *(f"\n{_dump({node: value})}" for node, value in nested(self.values).items())])

    def report(self) -> list[str]:
        """Return one line for each thing that was left behind or that the user should see to."""
        return [*self.remarks, *(f"{key}: {why}" for key, why in self.notes.items())]


def load_table(trainer: str) -> dict[str, Any]:
    """Return what the keys of a trainer mean, from its YAML beside this file."""
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(f"{trainer}.yaml").read_text(encoding="utf-8"))
    return table


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, leaf = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree


class _Dumper(yaml.SafeDumper):
    """Mappings over lines, lists of values in one."""

    def represent_list(self, data: list[Any]) -> yaml.Node:
        """Represent a list."""
        flow = not any(isinstance(item, dict) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_Dumper.add_representer(list, _Dumper.represent_list)


def _dump(value: Mapping[str, Any]) -> str:
    dumped: str = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120)
    return dumped if value else ""
