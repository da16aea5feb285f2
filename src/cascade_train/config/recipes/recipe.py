"""An experiment made from another trainer's configuration: what it chooses and sets, and what became of each key.

What the keys of a trainer mean lives in a YAML beside this file, read by table.py. Nothing is trained here, and no
expression of a configuration is run.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import yaml

from cascade_train.config.arguments import parameters
from cascade_train.config.groups import conf_dir, groups
from cascade_train.config.targets import import_target

DEFAULTS = {"data": "webdataset", "objective": "gdf"}
"""Options of groups that a recipe may leave out."""

OWN_OBJECTIVE = "override /objective@_global_.objective"
"""How a model chooses its objective in its defaults."""

ADDED = "+"
"""Before a group that is not among the defaults and is added, such as data@data.sources.mine."""

NAMES = re.compile(r"[a-z_]+(?:[.][a-z_]+)+|[a-z_]+=")
"""Our keys and groups in the words of a table."""

LONGEST = 200
"""Characters of a value in the report."""


class Kind(StrEnum):
    """What became of a key, as a heading of the report."""

    TAKEN = "Taken over"
    SAME = "The same here without it"
    UNNEEDED = "Not needed here"
    MISSING = "Cannot be said here"
    UNKNOWN = "Not known, so nothing was taken from it"
    YOURS = "Left to you"


@dataclass(kw_only=True)
class Recipe:
    """An experiment in the making.

    Attributes:
        groups: group -> option, in the order of the file.
        values: dotted key -> value.
        remarks: sentences about the whole, printed and written into the file.
        fates: the trainer's key -> what became of it, and a sentence.
        origins: our key or group -> the trainer's key that it comes from.
        assigned: the trainer's key -> what it comes to, by our keys.
        defaults: our keys whose values are the defaults of what is chosen, so that the file needs none of them.
        implied: the trainer's keys that its file does not have, taken as its trainer takes them.
    """

    groups: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    fates: dict[str, tuple[Kind, str]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    assigned: dict[str, dict[str, Any]] = field(default_factory=dict)
    defaults: set[str] = field(default_factory=set)
    implied: set[str] = field(default_factory=set)

    @property
    def timesteps(self) -> bool:
        """Whether the chosen model has Stable Diffusion's timesteps, by the objective that it brings."""
        return own_objective(self.groups.get("model", "")).startswith("ddpm")

    def note(self, key: str, why: str, kind: Kind = Kind.YOURS) -> None:
        """Say what became of a key of the trainer's."""
        self.fates[key] = (kind, why)

    def put(self, key: str, assigned: Mapping[str, Any]) -> None:
        """Take over what a key of the trainer's comes to: values by dotted key, options by group."""
        for ours, value in assigned.items():
            if ours.partition("@")[0].removeprefix(ADDED) in groups():
                self.groups[ours] = str(value)
            else:
                self.values[ours] = value
            self.origins[ours] = key
            self.assigned.setdefault(key, {})[ours] = value
        self.note(key, "", Kind.TAKEN)

    def leave_out_unknown(self) -> None:
        """Leave out keys that the chosen components do not take, and say so."""
        for key in list(self.values):
            if not self._known(key):
                node, value = key.partition(".")[0], self.values.pop(key)
                origin = self.origins.get(key, key)
                if origin not in self.implied:
                    why = f"{key}={shown(value)} is left out: {node}={self._option(node)} takes no such key"
                    self.note(origin, why, Kind.MISSING)
                else:
                    self.fates.pop(origin, None)

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
        """Return the experiment's file: what it is, the command that runs it, its choices, its values."""
        added_first = sorted(self.groups.items(), key=lambda each: not each[0].startswith(ADDED))  # as Hydra wants it
        body = {"defaults": [dict([_choice(*each)]) for each in added_first]} if self.groups else {}
        about = [line for remark in self.remarks for line in textwrap.wrap(remark, 118, break_long_words=False)]
        parts = ["# @package _global_\n", *(f"# {line}\n" for line in (title, command, *about)), _dump(body)]
        values = nested({key: value for key, value in self.values.items() if key not in self.defaults})
        return "".join([*parts, *(f"\n{_dump({node: value})}" for node, value in values.items())])

    def report(self) -> list[str]:
        """Return the remarks, and each key of the trainer's under what became of it; those of one fate share a line."""
        lines = list(self.remarks)
        told: dict[tuple[Kind, str], list[str]] = {}
        for key in self.fates:
            told.setdefault(self._told(key), []).append(key)
        for kind in Kind:
            some = [f"  {', '.join(keys)}: {why}" for (its, why), keys in told.items() if its is kind]
            lines += [f"{kind}:", *some] if some else []
        return lines

    def _told(self, key: str) -> tuple[Kind, str]:
        """Return what became of a key, with what it comes to."""
        kind, why = self.fates[key]
        if kind is Kind.TAKEN:
            ours = self.assigned.get(key) or self._read(why)
            why = "" if ours else why
            kind = Kind.SAME if ours and ours.keys() <= self.defaults else kind
            why = ", ".join([*(f"{k}={shown(v)}" for k, v in ours.items()), *([why] if why else [])])
        return kind, f"{why}{'; its default' if key in self.implied else ''}"

    def _read(self, words: str) -> dict[str, Any]:
        """Return what the recipe sets of the keys of ours that words name."""
        named = [name.rstrip("=") for name in NAMES.findall(words)]
        chosen = {group: option for group, option in self.groups.items() if group.partition("@")[0] in named}
        return chosen | {key: self.values[key] for key in named if key in self.values}


@functools.cache
def own_objective(model: str) -> str:
    """Return the option of the group objective that a model brings."""
    file = conf_dir() / "model" / f"{model}.yaml"
    given = yaml.safe_load(file.read_text(encoding="utf-8")).get("defaults", []) if file.is_file() else []
    found = [each[OWN_OBJECTIVE] for each in given if isinstance(each, dict) and OWN_OBJECTIVE in each]
    return str([DEFAULTS["objective"], *found][-1])


def _choice(group: str, option: str) -> tuple[str, str]:
    added = group.startswith(ADDED)
    return f"/{group.removeprefix(ADDED)}" if added else f"override /{group}", option


def shown(value: Any) -> str:
    """Return a value as an override has it, shortened."""
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


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
