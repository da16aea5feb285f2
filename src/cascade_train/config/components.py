"""Check component nodes against the constructors that they name, and construct them.

What a target may be lives in targets.py, what an argument may be in arguments.py; rules that tie nodes together live in
preflight.py.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cascade_train.config.arguments import HYDRA_KEYS, Parameter, fits, literals, needs_component, parameters
from cascade_train.config.contracts import broken_contract, hold_returns
from cascade_train.config.groups import group_form, groups, nearest, unknown_hint
from cascade_train.config.help import argument_doc, meaning_of
from cascade_train.config.targets import check_targets, components_in, import_target, is_component
from cascade_train.errors import ConfigError

LATER = object()
"""In the place of what is not constructed on trial."""


def check_component(
    path: str, node: Any, allowed: Sequence[str] | None, contracts: Mapping[str, Sequence[str]] = MappingProxyType({})
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
        reason = broken_contract(place, target, made, contracts.get(place, ()))
        if reason is None:
            _check_arguments(place, each)
            hold_returns(made)
        broken = broken or reason
    if broken is not None:
        raise ConfigError(broken)


def construct(node: Any, path: str = "", *, trial: bool = False) -> Any:
    """Construct a checked component, nested ones first.

    `node` is plain or OmegaConf's, `path` its key. On `trial` it is constructed for its refusals alone: what may be
    expensive is left out, modules of torch and what a function makes, and `LATER` is returned in their place.

    Raises:
        ConfigError: a constructor refused its arguments.
    """
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    return _constructed(plain, path, trial)


def _constructed(node: Any, path: str, trial: bool) -> Any:
    if isinstance(node, list):
        items = [_constructed(value, f"{path}[{position}]", trial) for position, value in enumerate(node)]
        return LATER if any(item is LATER for item in items) else items
    if not isinstance(node, Mapping):
        return node
    recurse = node.get("_recursive_", True)
    values = {key: _constructed(value, f"{path}.{key}", trial) if recurse else value for key, value in node.items()}
    is_later = any(value is LATER for value in values.values())
    if is_later or not is_component(node):
        return LATER if is_later else values
    named = {key: value for key, value in values.items() if key not in HYDRA_KEYS}
    make = functools.partial(import_target(node["_target_"]), *values.get("_args_", ()), **named)
    try:
        is_partial = node.get("_partial_", False)
        if trial:
            return _tried(make, is_partial=is_partial)
        return make if is_partial else make()
    except ValueError as error:
        if trial and "process group has not been initialized" in str(error):
            return LATER  # it asks for its rank, which it has once the run begins
        raise ConfigError(by_path(str(error), path)) from error


def _tried(make: functools.partial[Any], *, is_partial: bool) -> Any:
    """Construct on trial what is not expensive; return `LATER` in the place of the rest."""
    torch = sys.modules.get("torch")
    if not isinstance(make.func, type) or (torch and not is_partial and issubclass(make.func, torch.nn.Module)):
        return LATER
    if is_partial and torch and issubclass(make.func, torch.optim.Optimizer):
        _try_optimizer(make, torch)
    return make if is_partial else make()


def _try_optimizer(make: functools.partial[Any], torch: Any) -> None:
    """Let an optimizer check its arguments: first without parameters, which is cheap."""
    lr = parameters(make.func)[0].get("lr")
    needed = {"lr": 1.0} if lr is not None and lr.required and "lr" not in make.keywords else {}
    for tried in ([], [torch.nn.Parameter(torch.zeros(2, 2))]):
        try:
            make(tried, **needed)
        except ValueError as error:
            if tried:
                raise
            if "empty parameter list" not in str(error):
                continue
        except Exception:  # noqa: BLE001, S110 - what it lacks here, such as a device, it may have when it is built
            pass
        return


def check_is_component(path: str, node: Any) -> None:
    """Refuse a root component that is something else, such as a text."""
    if not is_component(node):
        raise ConfigError(f"{path}={_shown(node)} is not a component (a node with _target_). {group_form(path, node)}")


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
            hint = _base_hint(import_target(target), key) or unknown_hint(path, key, known)
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
    return f"{path}={_shown(value)} is of type {type(value).__name__}, but {wanted} is wanted there."


def _shown(value: Any) -> str:
    if is_component(value):
        return f"<{value['_target_']}>"
    return "null" if value is None else str(value)
