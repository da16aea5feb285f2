"""An experiment made from another trainer's configuration: what it chooses and sets, and what became of each key.

Tables of the trainers' keys are YAML files beside this one, read by table.py. No expression of a file is run.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cascade_train.config.arguments import HYDRA_KEYS, parameters
from cascade_train.config.groups import conf_dir, groups
from cascade_train.config.launch import compose_root
from cascade_train.config.preflight import EXTRAS, preflight
from cascade_train.config.targets import import_target
from cascade_train.errors import ConfigError, install_hint
from cascade_train.files.durable import to_yaml

OWN_OBJECTIVE = "override /objective@_global_.objective"
"""The entry in a model's defaults that chooses its objective."""
ADDED = "+"
"""Prefix of a group that is added to the defaults, such as data@data.sources.mine."""
LONGEST = 200
"""Characters of a value in the report."""
OPTION, KEY = re.compile(r"[\w-]+", re.ASCII), re.compile(r"[+\w@./-]+", re.ASCII)
OUR_CLASSES = ("cascade_train.", "torch.optim.")
"""Packages of the classes that tables name."""
UNTRUSTED = "a file of another trainer may hold no command (pipe:), no interpolation (${) and no class"


class Kind(StrEnum):
    """What became of a key, as a heading of the report."""

    TAKEN = "Taken over"
    SAME = "The same here without it"
    UNNEEDED = "Not needed here"
    MISSING = "Not supported"
    UNKNOWN = "Not known, so nothing was taken from it"
    YOURS = "Left to you"


@dataclass(kw_only=True)
class Recipe:
    """An experiment in the making."""

    groups: dict[str, str] = field(default_factory=dict)  # group -> option, in the order of the file
    values: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    remarks: list[str] = field(default_factory=list)  # sentences about the whole, printed and written into the file
    fates: dict[str, tuple[Kind, str]] = field(default_factory=dict)  # the trainer's key -> its fate, and a sentence
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)  # our key or group -> the trainer's keys
    defaults: set[str] = field(default_factory=set)  # our keys at the defaults of what is chosen, left out of the file
    implied: set[str] = field(default_factory=set)  # the trainer's keys that its file lacks, at its trainer's defaults
    asked: set[str] = field(default_factory=set)  # groups that the user must choose; `groups` has a provisional option

    @property
    def timesteps(self) -> bool:
        """Whether the chosen model has Stable Diffusion's timesteps, by the objective that it brings."""
        return own_objective(self.groups.get("model", "")).startswith("ddpm")

    def note(self, key: str, why: str, kind: Kind = Kind.YOURS) -> None:
        """Note what became of a key of the trainer's."""
        self.fates[key] = (kind, why)

    def put(self, keys: str | Iterable[str], assigned: Mapping[str, Any]) -> None:
        """Set what the trainer's keys mean: values by dotted key, options by group."""
        names = (keys,) if isinstance(keys, str) else tuple(sorted(keys) if isinstance(keys, Set) else keys)
        replaced = {key for ours in assigned for key in self.origins.get(ours, ())} - set(names)
        self.groups |= {ours: str(value) for ours, value in assigned.items() if is_group(ours)}
        self.values |= {ours: value for ours, value in assigned.items() if not is_group(ours)}
        self.origins |= dict.fromkeys(assigned, names)
        self.fates |= dict.fromkeys(names, (Kind.TAKEN, ""))
        self._forget(sorted(replaced - self.taken().keys()), f"{names[0]} goes before it", Kind.UNNEEDED)

    def drop(self, ours: str, why: str, kind: Kind = Kind.YOURS) -> None:
        """Remove a value or a choice."""
        self.values.pop(ours, None)
        if ours not in ("model", "task"):
            self.groups.pop(ours, None)
        self._forget(self.origins.pop(ours, (ours,)), why, kind)

    def _forget(self, keys: Iterable[str], why: str, kind: Kind) -> None:
        for key in keys:
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
        every = self.groups | self.values
        named = dict.fromkeys(key for keys in self.origins.values() for key in keys)
        return {key: {ours: every[ours] for ours, keys in self.origins.items() if key in keys} for key in named}

    def confine(self) -> None:
        """Leave out what an untrusted file must not put into a recipe, in keys and values."""
        for ours, value in [*self.values.items(), *self.groups.items()]:
            if any(map(is_untrusted, _texts(value, ours))) or not KEY.fullmatch(ours):
                self.drop(ours, f"{ours.rpartition('.')[0] or 'it'} is not set from it: {UNTRUSTED}")
            elif ours in self.groups and not OPTION.fullmatch(value):
                self.drop(ours, f"{ours}= takes one of its options")

    def text(self, *, title: str, command: str) -> str:
        """Return the experiment's file: what it is, the command that runs it, its choices, its values."""
        self.confine()
        chosen = {group: option for group, option in self.groups.items() if group not in self.asked}
        names = {group: f"/{group[1:]}" if group.startswith(ADDED) else f"override /{group}" for group in chosen}
        added_first = sorted(chosen, key=lambda group: not group.startswith(ADDED))  # as Hydra wants it
        body = {"defaults": [{names[group]: chosen[group]} for group in added_first]} if chosen else {}
        about = [line for remark in self.remarks for line in textwrap.wrap(remark, 118, break_long_words=False)]
        lines = [line for line in (title, command, *about) if not is_untrusted(line)]
        parts = ["# @package _global_\n", *(f"# {line}\n" for line in lines), to_yaml(body) if body else ""]
        tree = OmegaConf.create()
        for key, value in self.values.items():
            if key not in self.defaults:
                OmegaConf.update(tree, key, value, force_add=True)
        values: Any = OmegaConf.to_container(tree)
        return "".join([*parts, *(f"\n{to_yaml({node: value})}" for node, value in values.items())])

    def report(self) -> list[str]:
        """Return the remarks, and each key of the trainer's under what became of it; those of one fate share a line."""
        lines, taken = list(self.remarks), self.taken()
        alike: dict[tuple[Kind, str], list[str]] = {}
        for key, (kind, why) in self.fates.items():
            if kind is Kind.TAKEN:
                ours = taken.get(key, {})
                kind = Kind.SAME if ours.keys() <= self.defaults else kind
                why = ", ".join(f"{name}={shown(value)}" for name, value in ours.items())
            why += "; its default" if key in self.implied else ""
            alike.setdefault((kind, why), []).append(key)
        for kind in Kind:
            some = [f"  {', '.join(keys)}: {why}" for (its, why), keys in alike.items() if its is kind]
            lines += [f"{kind}:", *some] if some else []
        return lines


def is_group(ours: str) -> bool:
    """Return whether a key of ours is a group, whose options are files."""
    return ours.partition("@")[0].removeprefix(ADDED) in groups()


def is_untrusted(text: str) -> bool:
    """Return whether a text in a configuration could run a command or read more than itself."""
    return "${" in text or "pipe:" in text.lower()


def _texts(value: Any, key: str) -> Iterator[str]:
    """Yield every text of a value, its keys included; `${` for a class or a pattern that could become a command."""
    if isinstance(value, Mapping):
        yield from ("${" if name in HYDRA_KEYS else str(name) for name in value)
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
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
    own = [each[OWN_OBJECTIVE] for each in given if OWN_OBJECTIVE in each]
    bases = [own_objective(each) for each in given if isinstance(each, str) and each != "_self_"]
    return str(["gdf", *bases, *own][-1])


def shown(value: Any) -> str:
    """Return a value as an override has it, shortened."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def settle(recipe: Recipe) -> DictConfig:
    """Compose a recipe's choices, drop what they do not take or a file must not say, and note what is a default."""
    recipe.confine()
    try:
        cfg = compose_root([f"{group}={option}" for group, option in recipe.groups.items()])
    except HydraException as error:
        raise ConfigError(f"the choices {recipe.groups} do not compose: {str(error).splitlines()[0]}.") from error
    _join_lists(recipe, cfg)
    open_nodes = recipe.asked | ({"objective"} if "model" in recipe.asked else set())
    recipe.defaults = {
        key for key, value in recipe.values.items()
        if key.partition(".")[0] not in open_nodes and OmegaConf.select(cfg, key, default=...) == value
    }  # fmt: skip
    for key in sorted(recipe.values, key=lambda key: not key.endswith("_target_")):
        target, argument = _component(cfg, key)
        if key.endswith("_target_"):
            OmegaConf.update(cfg, key, recipe.values[key], force_add=True)
        elif target is not None and argument not in parameters(import_target(target))[0]:
            node = key.partition(".")[0]
            chosen = f"{node}={recipe.groups[node]}" if node in recipe.groups else target.rpartition(".")[2]
            why = f", where {node}= takes it" if node in recipe.asked else f" is left out: {chosen} takes no such key"
            recipe.drop(key, f"{key}={shown(recipe.values[key])}{why}", Kind.MISSING)
    return cfg


def try_out(recipe: Recipe, source: str, *, ranks: int) -> None:
    """Check a recipe by preflight, and note what is left to the user; a ConfigError names a refused key of the file."""
    cfg = settle(recipe)
    for key, value in recipe.values.items():
        try:
            OmegaConf.update(cfg, key, value, force_add=True)
        except OmegaConfBaseException as error:
            raise _refused(source, recipe, key, str(error).splitlines()[0]) from error
    _fill(cfg, recipe)
    try:
        preflight(cfg, ranks=ranks)
    except ConfigError as error:
        named = (key for key in recipe.values if re.search(rf"(?<![\w.]){re.escape(key)}(=|:| |\.)", str(error)))
        if key := next(named, ""):
            raise _refused(source, recipe, key, str(error)) from error
        if __file__ not in str(error):
            recipe.note("a training", f"before it begins: {error}")


def _refused(source: str, recipe: Recipe, key: str, why: str) -> ConfigError:
    origin = ", ".join(recipe.origins.get(key, (key,)))
    return ConfigError(
        f"{source}: {origin} becomes {key} here, and its value is refused: {why.rstrip('.')}. Mend it there."
    )


def _join_lists(recipe: Recipe, cfg: DictConfig) -> None:
    """Join elements, such as betas.0 and betas.1, into one list; the others are those of the default."""
    for key in [key for key in recipe.values if re.search(r"\.\d$", key)]:
        place, _, position = key.rpartition(".")
        value, origin = recipe.values.pop(key), recipe.origins.pop(key)
        default = OmegaConf.select(cfg, place) or []
        listed = list(recipe.values.get(place, default))
        if int(position) < len(listed):
            listed[int(position)] = value
            recipe.put({*recipe.origins.get(place, ()), *origin}, {place: listed})
        else:
            recipe.put(origin, {key: value})
            recipe.drop(key, f"{place} is not an argument of what is chosen", Kind.MISSING)


def _component(cfg: DictConfig, key: str) -> tuple[str | None, str]:
    """Return the class of the innermost component that a key goes to, and the argument of it; None = a typed node."""
    target, argument = None, ""
    node: Any = cfg
    parts = key.split(".")
    for parent, part in zip([None, *parts], parts, strict=False):
        node = node if parent is None else node.get(parent)
        if not isinstance(node, DictConfig):
            break
        if not OmegaConf.is_missing(node, "_target_") and node.get("_target_") is not None:
            target, argument = node.get("_target_"), part
    return target, argument


def _fill(cfg: DictConfig, recipe: Recipe) -> None:
    """Note what is missing, and put something in its place, and in that of libraries that are not here."""
    for key in sorted(OmegaConf.missing_keys(cfg)):
        recipe.note(key, f"set it: {key}=...")
        OmegaConf.update(cfg, key, str(Path(__file__)))
    choice = str(cfg.tracker.name)
    if choice in EXTRAS["tracker.name"] and importlib.util.find_spec(EXTRAS["tracker.name"][choice]) is None:
        recipe.note("tracker.name", f"{choice} is not installed here. {install_hint(choice)}.")
        cfg.tracker.name = "none"
