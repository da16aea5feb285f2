"""What a `_target_` names: which may be imported, what class it then is, and whether that keeps its contract.

Packages are allowed by name before anything of them is imported. Of this library and torch only components may be
named, judged by where a class is defined, whatever path leads to it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cascade_train.config.methods import wrong_arguments
from cascade_train.errors import ConfigError
from cascade_train.renamed import current_target
from cascade_train.signals import while_importing

TRUSTED = (
    "cascade_train.data", "cascade_train.diffusion", "cascade_train.engine.lr_schedule",
    "cascade_train.engine.optimizer", "cascade_train.filters", "cascade_train.models", "cascade_train.tasks",
    "torch.optim",
)  # fmt: skip
"""Where the classes lie that anyone's folder may name: their constructors check and store, and do nothing else."""

ENGINE = "cascade_train.engine"
ENGINE_BASES = ("cascade_train.engine.lr_schedule.LrSchedule", "torch.optim.optimizer.Optimizer")
"""What the classes inherit from that it may name in other files of the engine."""

ALSO_FOR_TRAINING = ("torch.nn",)
"""Where the classes lie that a configuration of one's own may name besides."""

FUNCTIONS = ("cascade_train.filters.network.load_exported",)
"""The functions that it may name: they read what the user gives them."""

CONFINED = ("cascade_train", "torch")
"""Packages that every configuration may name, and so only in part: torch alone can download code and run it."""

CONTRACTS: Mapping[str, Sequence[str]] = {
    "model": ["cascade_train.models.stage.Stage"],
    "task": ["cascade_train.tasks.base.Task"],
    "objective": ["cascade_train.diffusion.objective.Objective", "cascade_train.tasks.pictures.PictureObjective"],
    "data": ["cascade_train.data.source.Source"],
    "optimizer": ["cascade_train.engine.optimizer.OptimizerSpec"],
    "optimizer.algorithm": ["torch.optim.optimizer.Optimizer"],
    "lr_scheduler": ["cascade_train.engine.lr_schedule.LrSchedule"],
}
"""Key of a component -> the classes of which it must inherit from one. For other nested ones an annotation names it."""


def is_component(value: Any) -> bool:
    """Return whether a value names a `_target_`."""
    return isinstance(value, Mapping) and "_target_" in value


def components_in(path: str, node: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every component at and below a plain node with its path, outer ones first."""
    if is_component(node):
        yield path, node
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from components_in(f"{path}.{key}", value)
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for position, value in enumerate(node):
            yield from components_in(f"{path}[{position}]", value)


def check_targets(nodes: Mapping[str, Any], allowed: Sequence[str] | None) -> None:
    """Import what the components in nodes, by key, name; only after all of them are found to be allowed.

    Raises:
        ConfigError: a target that is not allowed, not there, or cannot be imported.
    """
    found = [(place, each["_target_"]) for key, node in nodes.items() for place, each in components_in(key, node)]
    for place, target in found:
        if not isinstance(target, str) or "." not in target:
            raise ConfigError(
                f"{place}._target_={target!r} must be the dotted path of a class, e.g. torch.optim.AdamW."
            )
        package = target.partition(".")[0]
        if allowed is not None and package not in allowed:
            raise ConfigError(
                f"{place}._target_={target} names the package {package!r}, which may not be loaded by a configuration. "
                f"Allow it: 'run.allowed_packages=[{','.join([*allowed, package])}]', or any by "
                "run.allow_any_target=true."
            )
    for place, target in found:
        try:
            if allowed is None or not _is_outside(target, (*TRUSTED, *ALSO_FOR_TRAINING)):
                made = import_target(target)
                if not callable(made):
                    raise ConfigError(f"{target} is a {type(made).__name__} and no class. Name a class.")
        except ConfigError as error:
            raise ConfigError(f"{place}._target_={error}") from error
        if allowed is not None:
            check_confined(place, target)


def import_target(target: str) -> Any:
    """Import what a dotted path names, today or in an earlier version.

    Raises:
        ConfigError: it names nothing, or its module cannot be imported; the message begins with the target.
    """
    top, *rest = current_target(target).split(".")
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        raise ConfigError(
            f"{target!r} names nothing: there is no module or package {top!r} where Python looks for one, such as the "
            f"current folder, {Path.cwd()}. Start the command in the folder that holds it, or add that to PYTHONPATH."
        )
    try:
        with while_importing():
            made, place = importlib.import_module(top), top
            for name in rest:
                inside = f"{place}.{name}"
                if hasattr(made, name):
                    made = getattr(made, name)
                elif hasattr(made, "__path__") and importlib.util.find_spec(inside) is not None:
                    made = importlib.import_module(inside)
                else:
                    near = difflib.get_close_matches(name, dir(made), n=1)
                    hint = f" Did you mean {place}.{near[0]}?" if near else ""
                    raise ConfigError(f"{target!r} names nothing: {place} has no {name!r}.{hint}")
                place = inside
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}: {error.msg}"
        raise ConfigError(f"{target.rpartition('.')[0]!r} cannot be read: {where}.") from error
    except ImportError as error:
        raise ConfigError(f"{target} cannot be imported: {error}.") from error
    except Exception as error:
        error.add_note(f"while {target} was imported")
        raise
    return made


def class_constant(target: str, name: str) -> Any:
    """Return the value that the class a target names has for all its objects; None where there is none."""
    try:
        value = getattr(import_target(target), name, None)
    except ConfigError:
        return None
    return None if callable(value) or isinstance(value, property) else value


def is_trusted(target: str) -> bool:
    """Return whether a target is a class that even a stranger's folder may name."""
    return _is_class_in(target, TRUSTED)


def check_confined(path: str, target: str) -> None:
    """Refuse a target of this library or torch that is no component."""
    if target in FUNCTIONS or target.partition(".")[0] not in CONFINED:
        return
    if not _is_class_in(target, (*TRUSTED, *ALSO_FOR_TRAINING)):
        places = {p: ".".join(target.split(".")[: p.count(".") + 1]) for p in (*TRUSTED, *ALSO_FOR_TRAINING)}
        near = next((p for p in places if difflib.get_close_matches(places[p], [p], cutoff=0.9)), None)
        hint = ""
        if near is not None and importlib.util.find_spec(places[near]) is None:
            hint = f" Did you mean {near}{target.removeprefix(places[near])}?"
        raise ConfigError(
            f"{path}._target_={target} is no component.{hint} Of torch a configuration may name the classes of "
            "torch.optim and torch.nn, of cascade_train those of its components: anything else could run code that it "
            "brings. If you trust it: run.allow_any_target=true."
        )


def _is_outside(target: str, places: Sequence[str]) -> bool:
    """Return whether a target of this library or torch is outside of these places, by its name alone."""
    inside = any(target.startswith(f"{place}.") for place in (*places, ENGINE))
    return target.partition(".")[0] in CONFINED and not inside


def _is_class_in(target: str, places: Sequence[str]) -> bool:
    """Return whether a target is a class that is defined at or below one of these places."""
    if target.partition(".")[0] not in CONFINED or _is_outside(target, places):
        return False
    try:
        made = import_target(target)
    except ConfigError:
        return False
    if not isinstance(made, type):
        return False
    home = f"{made.__module__}."
    if home.startswith(f"{ENGINE}.") and _inherited(made, ENGINE_BASES):
        return True
    return any(home.startswith(f"{place}.") for place in places)


def broken_contract(path: str, target: str, made: Any, bases: Sequence[str] = ()) -> str | None:
    """Return why the class that a target names cannot be used; None for no reason, and for what is no class.

    It must inherit from one of `bases`, dotted paths, where there are any, define what is abstract in it and the
    class variables that have no value, and its methods take the arguments of those that they replace.
    """
    if not isinstance(made, type):
        return None
    found = _inherited(made, bases)
    wanted = _left_open(import_target(bases[0])) if bases and not found else set[str]()
    lacking = {name for name in wanted if not hasattr(made, name)} | _left_open(made)
    if lacking or (bases and not found):
        return _reason(path, target, made.__name__, lacking, () if found else bases)
    reason = wrong_arguments(made)
    return None if reason is None else f"{path}._target_={target} cannot be used: {reason}"


def _inherited(made: type, bases: Sequence[str]) -> list[str]:
    own = {f"{base.__module__}.{base.__qualname__}" for base in made.__mro__}
    return [base for base in bases if base in own]


def _left_open(made: type) -> set[str]:
    """Return what a class leaves to those that inherit from it: abstract methods, class variables without a value."""
    hints = [item for base in made.__mro__ for item in inspect.get_annotations(base).items()]
    without = {name for name, hint in hints if "ClassVar" in str(hint) and not hasattr(made, name)}
    return without | set(getattr(made, "__abstractmethods__", ()))


def _reason(path: str, target: str, name: str, lacking: Collection[str], bases: Sequence[str]) -> str:
    """Return a paragraph on a class that lacks members, or a base where there are any."""
    names, who = ", ".join(sorted(lacking)), f"{path}._target_={target} cannot be used"
    if not bases:
        return f"{who}: {name} does not define {names}. Define what is missing."
    module, _, base = bases[0].rpartition(".")
    remedy = (
        f"Write 'from {module} import {base}' and 'class {name}({base})'{f', and define {names} in it' * bool(names)}"
    )
    if path == "optimizer":
        remedy = f"Choose optimizer=torch and optimizer.algorithm._target_={target}, or w{remedy[1:]}"
    any_of = " or ".join(each.rpartition(".")[2] for each in bases)
    return f"{who}: {name} does not inherit from {any_of}. {remedy}."
