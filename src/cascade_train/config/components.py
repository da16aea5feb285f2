"""Check component nodes against the constructors and base classes that they name, and construct them.

What a target may be lives in targets.py, what an argument may be in arguments.py; rules that tie nodes together live in
preflight.py. Methods of users' classes are compared with those of this library that they replace; the library's own are
checked by mypy.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cascade_train.config.arguments import (
    HYDRA_KEYS,
    Parameter,
    fits,
    literals,
    needs_component,
    parameters,
)
from cascade_train.config.error_messages import other_name
from cascade_train.config.groups import group_form, groups, nearest, unknown_hint
from cascade_train.config.help import argument_doc, meaning_of
from cascade_train.config.overrides import quoted_form
from cascade_train.config.targets import check_targets, components_in, import_target, inherited, is_component
from cascade_train.errors import ConfigError

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


def check_component(
    path: str, node: Any, allowed: Sequence[str] | None, contracts: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Check a component and everything nested in it; what they name is imported where it is allowed.

    `node`, at the key `path`, is plain and resolved. `allowed` are the top-level packages that `_target_` may name,
    None = any; `contracts` maps keys of components to dotted paths of classes, of which theirs must inherit from one.

    Raises:
        ConfigError: a target that is not allowed, not there, or does not keep its contract; an argument that is
            unknown, missing, or of a wrong type.
    """
    check_targets({path: node}, allowed)
    broken = None
    for place, each in components_in(path, node):
        target = each["_target_"]
        made = import_target(target)
        reason = broken_contract(place, target, made, (contracts or {}).get(place, ()))
        if reason is None:
            _check_arguments(place, each)
        broken = broken or reason
    if broken is not None:
        raise ConfigError(broken)


def check_is_component(path: str, node: Any) -> None:
    """Refuse a root component that is something else, such as a text."""
    if not is_component(node):
        in_file = f" In a file, its defaults choose it: - override /{path}: {node}." if isinstance(node, str) else ""
        raise ConfigError(
            f"{path}={_shown(node)} is not a component (a node with _target_). {group_form(path, node)}{in_file}"
        )


def missing_message(path: str, cfg: Mapping[str, Any]) -> str:
    """Return what to set for a `???` at `path` of the (unresolved, plain) configuration."""
    if path.rpartition(".")[2] in groups():
        return f"{path} is not chosen (???). {group_form(path, None)}"
    return _not_set(path, " (???)", meaning_of(path, cfg), path)


def _not_set(path: str, why: str, meaning: str, typed: str) -> str:
    return f"{path} is not set{why}{': ' if meaning else ''}{meaning.rstrip('.')}. Set it: {typed}=<value>."


def _check_arguments(path: str, node: Mapping[str, Any]) -> None:
    target = node["_target_"]
    try:
        known, takes_any = parameters(import_target(target))
    except (ValueError, TypeError):  # written in C, or nothing that can be called
        return
    given = {key: value for key, value in node.items() if key not in HYDRA_KEYS}
    for key in given:
        if key not in known and not takes_any:
            hint = _base_hint(import_target(target), key) or other_name(key) or unknown_hint(path, key, known)
            raise ConfigError(f"{path}.{key} is unknown: {target} has no such argument.{hint}")
    required = [name for name, parameter in known.items() if parameter.required and name not in given]
    required = required[len(node.get("_args_", ())) :]
    if required and not node.get("_partial_"):
        key = f"{path}.{required[0]}"
        raise ConfigError(_not_set(key, f", and {target} needs it", argument_doc(target, required[0]), f"+{key}"))
    for key, value in given.items():
        if key in known and not fits(value, known[key].hint):
            raise ConfigError(_mismatch(f"{path}.{key}", value, known[key]))


def _base_hint(made: Any, key: str) -> str:
    """Return a sentence on an argument that a base class takes, and the constructor of the class does not; or empty."""
    bases = [each for each in getattr(made, "__mro__", ())[1:] if each.__module__.startswith("cascade_train.")]
    base = next((each.__name__ for each in bases if key in parameters(each)[0]), None)
    own = f"{getattr(made, '__name__', '')}.__init__"
    return "" if base is None else f" {base} takes it: {own} must take it too and pass it on, or be left out."


def by_path(message: str, place: str) -> str:
    """Return what a constructor refused, its argument named by the whole path.

    A constructor names its argument alone (`rank=0`), below its own name (`network.dropout=2`), or by the whole path.
    """
    parts = place.split(".")
    named = re.match(r"([\w.]+)(\[\d+\])*(?P<end>[=: ])", message)
    key = named[1].split(".") if named else []
    if key[:1] == parts[:1]:
        return message
    if named is None or named["end"] == " ":
        return f"{place}: {message}"
    shared = next((n for n in range(len(parts), 0, -1) if parts[-n:] == key[:n]), 0)
    return ".".join([*parts[: len(parts) - shared], message])


def _mismatch(path: str, value: Any, parameter: Parameter) -> str:
    wanted = parameter.written
    if needs_component(parameter.hint) and not is_component(value):
        return f"{path}={_shown(value)} is not a component ({wanted} is wanted there). {group_form(path, value)}"
    if is_component(value):
        return f"{path} is a {value['_target_']}, but {wanted} is wanted there."
    if options := literals(parameter.hint):
        near = nearest(value, map(str, options)) if isinstance(value, str) else ""
        return f"{path}={_shown(value)} must be one of {', '.join(map(str, options))}.{near}"
    is_item = not isinstance(value, list) and fits([value], parameter.hint)
    form = quoted_form(f"{path}=[{value}]") if is_item else None
    text = f"{path}={_shown(value)} is of type {type(value).__name__}, but {wanted} is wanted there."
    return f"{text} Write: {form}" if form else text


def _shown(value: Any) -> str:
    if is_component(value):
        return f"<{value['_target_']}>"
    return "null" if value is None else str(value)


def broken_contract(path: str, target: str, made: Any, bases: Sequence[str] = ()) -> str | None:
    """Return why the class that a target names cannot be used; None for no reason, and for what is no class.

    It must inherit from one of `bases`, dotted paths, where there are any, define what is abstract in it and the
    class variables that have no value, and its methods take the arguments of those that they replace.
    """
    if not isinstance(made, type):
        return None
    name, who, lacking = made.__name__, f"{path}._target_={target} cannot be used", _left_open(made)
    if bases and not inherited(made, bases):
        lacking |= {each for each in _left_open(import_target(bases[0])) if not hasattr(made, each)}
        module, _, base = bases[0].rpartition(".")
        remedy = f"Write 'from {module} import {base}' and 'class {name}({base})'"
        remedy += f", and define {', '.join(sorted(lacking))} in it." if lacking else "."
        if path == "optimizer":
            remedy += f" Or choose optimizer=torch and optimizer.algorithm._target_={target}."
        any_of = " or ".join(each.rpartition(".")[2] for each in bases)
        return f"{who}: {name} does not inherit from {any_of}. {remedy}"
    if lacking:
        return f"{who}: {name} does not define {', '.join(sorted(lacking))}. Define what is missing."
    return None


def _left_open(made: type) -> set[str]:
    """Return what a class leaves to those that inherit from it: abstract methods, class variables without a value."""
    hints = [item for base in made.__mro__ for item in inspect.get_annotations(base).items()]
    without = {name for name, hint in hints if "ClassVar" in str(hint) and not hasattr(made, name)}
    return without | set(getattr(made, "__abstractmethods__", ()))
