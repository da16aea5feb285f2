"""Check component nodes against the constructors that they name, without importing those.

What a constructor is lives in static/signatures.py; cross-field rules live in preflight.py.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_type_hints

from cascade_train.config.groups import did_you_mean, group_options, groups, options_with
from cascade_train.config.schema import Root
from cascade_train.config.static.annotations import HYDRA_KEYS, fits, is_component, literals, needs_component
from cascade_train.config.static.contracts import broken_contract
from cascade_train.config.static.expressions import UNKNOWN
from cascade_train.config.static.guards import refusal
from cascade_train.config.static.signatures import (
    Parameter,
    Signature,
    argument_doc,
    attribute_docs,
    definition_chain,
    read_signature,
)
from cascade_train.config.static.static_source import UnreadableError
from cascade_train.config.static.targets import check_confined
from cascade_train.errors import ConfigError


def check_component(
    path: str,
    node: Any,
    allowed: Sequence[str] | None,
    derived: Collection[str] = frozenset(),
    contracts: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Check a component and everything nested in it.

    Args:
        path: key of the node.
        node: plain containers, interpolations resolved, nothing missing.
        allowed: top-level packages that `_target_` may name; None = any.
        derived: paths whose values follow other keys: what they may be is judged where they are used.
        contracts: key of a component -> dotted paths of the classes of which its own must inherit from one.

    Raises:
        ConfigError: a target that is not allowed, not there, or does not keep its contract; an argument that is
            unknown, missing, of a wrong type, or refused by the constructor's own checks.
    """
    broken = None
    if is_component(node):
        _check_target(path, node, allowed)
        if (broken := broken_contract(path, node["_target_"], contracts.get(path, ()))) is None:
            _check_arguments(path, node, derived)
        if allowed is not None:
            check_confined(path, node["_target_"])
    if isinstance(node, Mapping):
        for key, value in node.items():
            check_component(f"{path}.{key}", value, allowed, derived, contracts)
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for position, value in enumerate(node):
            check_component(f"{path}[{position}]", value, allowed, derived, contracts)
    if broken is not None:
        raise ConfigError(broken)


def check_is_component(path: str, node: Any) -> None:
    """Check that a root component is one.

    Raises:
        ConfigError: it is something else, such as a text.
    """
    if not is_component(node):
        raise ConfigError(f"{path}={_shown(node)} is not a component (a node with _target_). {group_form(path, node)}")


def group_form(path: str, value: Any) -> str:
    """Return the sentence that says how the component at `path` is chosen."""
    parent, _, name = path.rpartition(".")
    option = value if isinstance(value, str) and value.isidentifier() else "<option>"
    if not parent:
        return f"Choose it by its group: {path}={_nearest(path, option)} (options: {', '.join(group_options(path))})."
    if name in groups():
        choice = _nearest(name, option)
        return f"Choose it by its group: {name}@{path}={choice} (options: {', '.join(group_options(name))})."
    root = path.partition(".")[0]
    options = ", ".join(f"{root}={choice}" for choice in group_options(root))
    return f"Choose it by the group {root} ({options}), or name its class by {path}._target_=package.Class."


def unknown_hint(node: str, key: str, known: Iterable[str]) -> str:
    """Return a sentence on an unknown key of a component: the nearest of `known`, or the options that have the key."""
    near = did_you_mean(key, known, f"{node}.")
    options = [] if near.startswith(" Did you mean") else options_with(node, key)
    return f" It is a key of {' and '.join(f'{node}={o}' for o in options)}." if options else near


def missing_message(path: str, cfg: Mapping[str, Any]) -> str:
    """Return what to set for a `???` at `path` of the (unresolved, plain) configuration."""
    if path.rpartition(".")[2] in groups():
        return f"{path} is not chosen (???). {group_form(path, None)}"
    meaning = meaning_of(path, cfg)
    return f"{path} is not set (???){': ' if meaning else ''}{meaning.rstrip('.')}. Set it: {path}=<value>."


def meaning_of(path: str, cfg: Mapping[str, Any]) -> str:
    """Return what the schema, or the constructor of the component above it, says of a key of a plain configuration."""
    parent_path, _, name = path.rpartition(".")
    if name == "_target_":
        return "the dotted path of a class, e.g. torch.optim.SGD"
    typed = get_type_hints(Root).get(parent_path, Root if not parent_path else None)
    if dataclasses.is_dataclass(typed):
        return attribute_docs(typed).get(name, "")  # type: ignore[arg-type]
    parent: Any = cfg
    for part in filter(None, parent_path.split(".")):
        parent = parent.get(part) if isinstance(parent, Mapping) else None
    target = parent.get("_target_") if isinstance(parent, Mapping) else None
    return argument_doc(target, name) if isinstance(target, str) and target != "???" else ""


def _check_target(path: str, node: Mapping[str, Any], allowed: Sequence[str] | None) -> None:
    target = node["_target_"]
    if not isinstance(target, str) or "." not in target:
        raise ConfigError(f"{path}._target_={target!r} must be the dotted path of a class, e.g. torch.optim.AdamW.")
    package = target.partition(".")[0]
    if allowed is not None and package not in allowed:
        raise ConfigError(
            f"{path}._target_={target} names the package {package!r}, which may not be loaded by a configuration. "
            f"Allow it: 'run.allowed_packages=[{','.join([*allowed, package])}]', or any by run.allow_any_target=true."
        )


def _check_arguments(path: str, node: Mapping[str, Any], derived: Collection[str]) -> None:
    target = node["_target_"]
    try:
        signature = read_signature(target)
    except UnreadableError:
        return
    except ConfigError as error:
        raise ConfigError(f"{path}._target_={error}") from error
    given = {key: value for key, value in node.items() if key not in HYDRA_KEYS}
    _check_names(path, target, given, signature, node)
    for key, value in given.items():
        parameter = signature.parameters.get(key)
        if parameter is not None and not fits(value, parameter.annotation, parameter.module):
            raise ConfigError(_mismatch(f"{path}.{key}", value, parameter))
    unseen = node.get("_partial_") or node.get("_args_")
    later = dict.fromkeys(signature.parameters, UNKNOWN) if unseen else {}
    known = {
        key: UNKNOWN if _holds_component(value) or f"{path}.{key}" in derived else value for key, value in given.items()
    }
    if refused := refusal(definition_chain(target), later | known):
        raise ConfigError(by_path(refused, path))


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


def _holds_component(value: Any) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return is_component(value) or any(_holds_component(each) for each in inside)


def _check_names(
    path: str, target: str, given: Mapping[str, Any], signature: Signature, node: Mapping[str, Any]
) -> None:
    for key in given:
        if key not in signature.parameters and not signature.accepts_any:
            hint = unknown_hint(path, key, signature.parameters)
            raise ConfigError(f"{path}.{key} is unknown: {target} has no such argument.{hint}")
    positional = len(node.get("_args_", ()))
    required = [n for n, p in signature.parameters.items() if p.required and n not in given][positional:]
    if required and not node.get("_partial_"):
        name = required[0]
        meaning = argument_doc(target, name)
        raise ConfigError(
            f"{path}.{name} is not set, and {target} needs it{': ' if meaning else ''}{meaning.rstrip('.')}. "
            f"Set it: +{path}.{name}=<value>."
        )


def _mismatch(path: str, value: Any, parameter: Parameter) -> str:
    assert parameter.annotation is not None
    wanted = ast.unparse(parameter.annotation)
    if needs_component(parameter.annotation, parameter.module) and not is_component(value):
        return f"{path}={_shown(value)} is not a component ({wanted} is wanted there). {group_form(path, value)}"
    if is_component(value):
        return f"{path} is a {value['_target_']}, but {wanted} is wanted there."
    if options := literals(parameter.annotation):
        hint = did_you_mean(value, map(str, options)) if isinstance(value, str) else ""
        near = hint if hint.startswith(" Did you mean") else ""
        return f"{path}={_shown(value)} must be one of {', '.join(map(str, options))}.{near}"
    return f"{path}={_shown(value)} is of type {type(value).__name__}, but {wanted} is wanted there."


def _nearest(group: str, option: str) -> str:
    options = group_options(group)
    hint = did_you_mean(option, options).removeprefix(" Did you mean ").rstrip("?")
    return hint if hint in options else "<option>"


def _shown(value: Any) -> str:
    if is_component(value):
        return f"<{value['_target_']}>"
    return "null" if value is None else str(value)
