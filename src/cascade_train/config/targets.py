"""What a `_target_` names: which may be imported, and what it then is.

Packages are allowed by name before anything of them is imported. Of this library and torch only components may be
named, judged by where a class is defined, whatever path leads to it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cascade_train.errors import ConfigError
from cascade_train.signals import while_importing

TRUSTED = (
    "cascade_train.data", "cascade_train.diffusion", "cascade_train.engine.algorithms",
    "cascade_train.engine.lr_schedule", "cascade_train.engine.optimizer", "cascade_train.filters",
    "cascade_train.models", "cascade_train.tasks", "torch.optim",
)  # fmt: skip
"""Where the classes lie that anyone's folder may name: their constructors check and store, and do nothing else."""

COMPONENTS = (*TRUSTED, "torch.nn")
"""Where the classes lie that a configuration of one's own may name."""

FUNCTIONS = ("cascade_train.filters.network.load_exported",)
"""The functions that it may name: they read what the user gives them."""

CONFINED = ("cascade_train", "torch")
"""Packages that every configuration may name, and so only in part: torch alone can download code and run it."""


def is_component(value: Any) -> bool:
    """Whether a value names a `_target_`."""
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
    targets = [(place, each["_target_"]) for key, node in nodes.items() for place, each in components_in(key, node)]
    for place, target in targets:
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
    for place, target in targets:
        try:
            if allowed is None or target.partition(".")[0] not in CONFINED or _lies_in(target, COMPONENTS):
                component = import_target(target)
                if not callable(component):
                    raise ConfigError(f"{target} is a {type(component).__name__} and no class. Name a class.")
        except ConfigError as error:
            raise ConfigError(f"{place}._target_={error}") from error
        if allowed is not None:
            check_confined(place, target)


def import_target(target: str) -> Any:
    """Import what a dotted path names.

    Raises:
        ConfigError: it names nothing, or its module cannot be imported; the message begins with the target.
    """
    top, *rest = target.split(".")
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
    """Value that the class a target names has for all its objects; None where there is none."""
    try:
        value = getattr(import_target(target), name, None)
    except ConfigError:
        return None
    return None if callable(value) or isinstance(value, property) else value


def is_trusted(target: str) -> bool:
    """Whether a target is a class that even an untrusted configuration may name."""
    return target.partition(".")[0] in CONFINED and _is_class_in(target, TRUSTED)


def check_confined(path: str, target: str) -> None:
    """Refuse a target of this library or torch that is no component."""
    if target in FUNCTIONS or target.partition(".")[0] not in CONFINED or _is_class_in(target, COMPONENTS):
        return
    raise ConfigError(
        f"{path}._target_={target} is no component. Of torch a configuration may name the classes of torch.optim and "
        "torch.nn, of cascade_train those of its components: anything else could run code that it brings. If you trust "
        "it: run.allow_any_target=true."
    )


def _lies_in(path: str, places: Sequence[str]) -> bool:
    return any(path.startswith(f"{place}.") for place in places)


def _is_class_in(target: str, places: Sequence[str]) -> bool:
    """Whether a target is a class that is defined at or below one of these places, not only imported there."""
    if not _lies_in(target, places):
        return False
    try:
        component = import_target(target)
    except ConfigError:
        return False
    return isinstance(component, type) and _lies_in(f"{component.__module__}.", places)


def inherited(made: type, bases: Sequence[str]) -> list[str]:
    """Those of some dotted paths of classes that a class inherits from."""
    own = {f"{base.__module__}.{base.__qualname__}" for base in made.__mro__}
    return [base for base in bases if base in own]
