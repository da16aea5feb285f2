"""An experiment made from another trainer's configuration: what it chooses and sets, and what became of each key.

What the keys of a trainer mean lives in a YAML beside this file, read by table.py. Nothing is trained here, and no
expression of a configuration is run.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import yaml

from cascade_train.config.arguments import HYDRA_KEYS
from cascade_train.config.groups import conf_dir, groups

OWN_OBJECTIVE = "override /objective@_global_.objective"
"""How a model chooses its objective in its defaults."""

ADDED = "+"
"""Before a group that is not among the defaults and is added, such as data@data.sources.mine."""

LONGEST = 200
"""Characters of a value in the report."""

OPTION, KEY = re.compile(r"[\w-]+", re.ASCII), re.compile(r"[+\w@./-]+", re.ASCII)
"""What an option of a group, and a key, may be called."""
OUR_CLASSES = ("cascade_train.", "torch.optim.")
"""Where the classes lie that tables name."""
UNTRUSTED = "a file of another trainer may hold no command (pipe:), no interpolation (${) and no class"


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
        origins: our key or group -> the trainer's keys that it comes from.
        defaults: our keys whose values are the defaults of what is chosen, so that the file needs none of them.
        implied: the trainer's keys that its file does not have, taken as its trainer takes them.
        asked: groups that the file leaves open; the option here stands in for the one that the user gives.
    """

    groups: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    fates: dict[str, tuple[Kind, str]] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: set[str] = field(default_factory=set)
    implied: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)

    @property
    def timesteps(self) -> bool:
        """Whether the chosen model has Stable Diffusion's timesteps, by the objective that it brings."""
        return own_objective(self.groups.get("model", "")).startswith("ddpm")

    def note(self, key: str, why: str, kind: Kind = Kind.YOURS) -> None:
        """Say what became of a key of the trainer's."""
        self.fates[key] = (kind, why)

    def put(self, keys: str | Iterable[str], assigned: Mapping[str, Any]) -> None:
        """Take over what keys of the trainer's come to: values by dotted key, options by group."""
        names = (keys,) if isinstance(keys, str) else tuple(keys)
        replaced = {key for ours in assigned for key in self.origins.get(ours, ())} - set(names)
        for ours, value in assigned.items():
            if is_group(ours):
                self.groups[ours] = str(value)
            else:
                self.values[ours] = value
            self.origins[ours] = names
        for name in names:
            self.note(name, "", Kind.TAKEN)
        for key in replaced - self.taken().keys():
            self._forget(key, f"{names[0]} goes before it", Kind.UNNEEDED)

    def drop(self, ours: str, why: str, kind: Kind = Kind.YOURS) -> None:
        """Take a value or a choice out again."""
        self.values.pop(ours, None)
        if ours not in ("model", "task"):
            self.groups.pop(ours, None)
        for key in self.origins.pop(ours, (ours,)):
            self._forget(key, why, kind)

    def _forget(self, key: str, why: str, kind: Kind) -> None:
        if key not in self.implied:
            self.note(key, why, kind)
        elif key not in self.taken():
            self.fates.pop(key, None)

    def ask(self, group: str, why: str) -> None:
        """Leave the choice of a group to the user."""
        self.asked.add(group)
        self.note(group, why)

    def taken(self) -> dict[str, dict[str, Any]]:
        """Return the trainer's keys that something in the recipe comes from, each with that."""
        found: dict[str, dict[str, Any]] = {}
        every = self.groups | self.values
        for ours, keys in self.origins.items():
            for key in keys:
                found.setdefault(key, {})[ours] = every[ours]
        return found

    def confine(self) -> None:
        """Leave out what a file of a stranger must not put into a recipe, wherever in a key or a value it lies."""
        for ours, value in [*self.values.items(), *self.groups.items()]:
            if any(map(is_untrusted, _texts(value, ours))) or not KEY.fullmatch(ours):
                self.drop(ours, f"{ours.rpartition('.')[0] or 'it'} is not set from it: {UNTRUSTED}")
            elif ours in self.groups and not OPTION.fullmatch(value):
                self.drop(ours, f"{ours}= takes one of its options")

    def text(self, *, title: str, command: str) -> str:
        """Return the experiment's file: what it is, the command that runs it, its choices, its values."""
        self.confine()
        chosen = {group: option for group, option in self.groups.items() if group not in self.asked}
        added_first = sorted(chosen.items(), key=lambda each: not each[0].startswith(ADDED))  # as Hydra wants it
        body = {"defaults": [dict([_choice(*each)]) for each in added_first]} if chosen else {}
        about = [line for remark in self.remarks for line in textwrap.wrap(remark, 118, break_long_words=False)]
        lines = [line for line in (title, command, *about) if not is_untrusted(line)]
        parts = ["# @package _global_\n", *(f"# {line}\n" for line in lines), _dump(body)]
        values = nested({key: value for key, value in self.values.items() if key not in self.defaults})
        return "".join([*parts, *(f"\n{_dump({node: value})}" for node, value in values.items())])

    def report(self) -> list[str]:
        """Return the remarks, and each key of the trainer's under what became of it; those of one fate share a line."""
        lines, taken = list(self.remarks), self.taken()
        told: dict[tuple[Kind, str], list[str]] = {}
        for key in self.fates:
            told.setdefault(self._told(key, taken.get(key, {})), []).append(key)
        for kind in Kind:
            some = [f"  {', '.join(keys)}: {why}" for (its, why), keys in told.items() if its is kind]
            lines += [f"{kind}:", *some] if some else []
        return lines

    def _told(self, key: str, ours: Mapping[str, Any]) -> tuple[Kind, str]:
        """Return what became of a key, with what it comes to."""
        kind, why = self.fates[key]
        if kind is Kind.TAKEN:
            kind = Kind.SAME if ours.keys() <= self.defaults else kind
            why = ", ".join(f"{name}={shown(value)}" for name, value in ours.items())
        return kind, f"{why}{'; its default' if key in self.implied else ''}"


def is_group(ours: str) -> bool:
    """Return whether a key of ours is a group, whose options are files."""
    return ours.partition("@")[0].removeprefix(ADDED) in groups()


def is_untrusted(text: str) -> bool:
    """Return whether a text could run a command or read more than itself, once it stands in a configuration."""
    small = text.lower()
    return "${" in small or "pipe:" in small


def _texts(value: Any, key: str) -> Iterator[str]:
    """Yield every text of a value, its keys included; as one more what could become another under a key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield "${" if name in HYDRA_KEYS else str(name)
            yield from _texts(inner, key)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str):
        is_class = key.rpartition(".")[2] in HYDRA_KEYS and not value.startswith(OUR_CLASSES)
        expands = key.endswith("urls") and ":" in value.partition("{")[2]  # {pip,x}e:
        yield "${" if is_class or expands else value


@functools.cache
def own_objective(model: str) -> str:
    """Return the option of the group objective that a model brings."""
    file = conf_dir() / "model" / f"{model}.yaml"
    given = yaml.safe_load(file.read_text(encoding="utf-8")).get("defaults", []) if file.is_file() else []
    found = [each[OWN_OBJECTIVE] for each in given if isinstance(each, dict) and OWN_OBJECTIVE in each]
    return str(["gdf", *found][-1])


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
