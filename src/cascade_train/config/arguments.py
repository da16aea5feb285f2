"""The arguments of a constructor: their types, whether a configured value fits them, and what they mean to resumes.

An annotation that cannot be evaluated takes any value: the constructor decides.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from cascade_train.config.overrides import is_existing_path
from cascade_train.config.targets import import_target, is_component
from cascade_train.errors import ConfigError

HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
"""Keys of a component that are none of its arguments."""

SCALARS: dict[type, Any] = {int: int, float: (int, float), str: str, bool: bool, Path: str, bytes: bytes}
COLLECTIONS = (list, tuple, set, frozenset, Sequence, Iterable, Collection, dict, Mapping, MutableMapping)
OPEN_TYPES = (enum.Enum, str, int, float, dict, tuple)
"""Subclasses of these stand for plain values too."""

HEAP_TYPE = 1 << 9
"""Flag of classes written in Python; one written in C, such as `torch.device`, may be made of a text."""

LOOP_FILES = ("ema.weights", "validate.lpips", "validate.rfid")
"""Options of the typed nodes that name files."""


class Parameter(NamedTuple):
    """One argument of a constructor.

    `hint` is its type, Any where that cannot be evaluated; `written` as it is written, without the markers of
    cascade_train/options.py around it, whose names are `roles`.
    """

    hint: Any
    written: str
    required: bool
    roles: frozenset[str] = frozenset()


class Option(NamedTuple):
    """One value of a configuration, with the roles of its option."""

    key: str
    value: Any
    roles: frozenset[str]


@functools.cache
def parameters(made: Any) -> tuple[Mapping[str, Parameter], bool]:
    """Return the arguments of a class or function by name, in order, and whether it takes any others.

    Raises:
        ValueError: it is written in C.
    """
    every = inspect.signature(made).parameters.values()
    starred = [each for each in every if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    named = {each.name: _parameter(made, each) for each in every if each not in starred}
    return named, any(each.kind is each.VAR_KEYWORD for each in starred)


def _parameter(made: Any, found: inspect.Parameter) -> Parameter:
    annotation, required = found.annotation, found.default is found.empty
    if annotation is found.empty:
        return Parameter(Any, "", required)
    written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    hint = _evaluated(made, found.name, annotation)
    roles = {*hint.__metadata__} if get_origin(hint) is Annotated else set[str]()
    # a module may import these for types alone
    while marked := re.fullmatch(r"(Free|Order|File|Positive|Several|Share|Rising)\[(.*)]", written):
        roles.add(marked[1])
        written = marked[2]
    return Parameter(hint, written, required, frozenset(roles))


def _evaluated(made: Any, name: str, annotation: Any) -> Any:
    """Return the type behind an annotation, with the names of the module that holds it."""
    fields = [base for base in getattr(made, "__mro__", ()) if inspect.get_annotations(base).get(name) == annotation]
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    try:
        module = vars(sys.modules[(fields or [made])[0].__module__])
        names = module if fields else getattr(inspect.unwrap(made.__init__), "__globals__", module)
        return get_type_hints(holder, names, include_extras=True)[name]
    except Exception:  # noqa: BLE001 - a name for type checkers alone, or no type
        return Any


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value, as read from YAML, fits a type; in doubt it does."""
    origin, items = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return fits(value, items[0])
    if origin in (Union, types.UnionType):
        return any(fits(value, item) for item in items)
    if origin is Literal:
        return any(isinstance(item, enum.Enum) or (type(value) is type(item) and value == item) for item in items)
    if not isinstance(origin, type) or origin in (Any, object, type):
        return True
    if is_component(value):
        return bool(items) or _may_make(value, origin)
    if origin in SCALARS:
        return isinstance(value, SCALARS[origin]) and isinstance(value, bool) == (origin is bool)
    if origin in COLLECTIONS or (items and issubclass(origin, Iterable)):
        return _fits_items(value, origin, items)
    return value is None if origin is type(None) else issubclass(origin, OPEN_TYPES) or not origin.__flags__ & HEAP_TYPE


def _fits_items(value: Any, origin: type, items: Sequence[Any]) -> bool:
    if isinstance(value, Mapping) != issubclass(origin, Mapping) or not isinstance(value, Sequence | Mapping):
        return False
    return not isinstance(value, str) and items_match(value, origin, items, fits)


def items_match(value: Collection[Any], origin: Any, items: Sequence[Any], check: Callable[[Any, Any], bool]) -> bool:
    """Return whether what a collection holds passes a check against the items of its generic type."""
    if not items:
        return True
    held = list(value.values() if isinstance(value, Mapping) else value)
    wanted = items if origin is tuple and ... not in items else [items[0 if ... in items else -1]] * len(held)
    return len(held) == len(wanted) and all(map(check, held, wanted))


def _may_make(component: Mapping[str, Any], parent: Any) -> bool:
    """Return whether a component's class is `parent` or one of its subclasses; True where it is unknown."""
    if component.get("_partial_") or parent is Callable or getattr(parent, "_is_protocol", False):
        return True
    try:
        made = import_target(str(component["_target_"]))
    except ConfigError:
        return True
    return not isinstance(made, type) or issubclass(made, parent)


def needs_component(hint: Any) -> bool:
    """Return whether a type is for objects: a component or null fits, a text and a number do not."""
    plain_values: tuple[Any, ...] = ("text", 0, 0.5, True, [])
    return not literals(hint) and not any(fits(value, hint) for value in plain_values)


def literals(hint: Any) -> list[Any]:
    """Return the values that every `Literal[…]` in a type lists, in order; empty where there is none."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [value for item in get_args(hint) for value in literals(item)]


def declared_roles(node: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the roles of a component's options by name; empty for other nodes, and for what cannot be imported."""
    if not is_component(node):
        return {}
    try:
        named, _ = parameters(import_target(str(node["_target_"])))
    except (ConfigError, ValueError, TypeError):
        return {}
    return {name: parameter.roles for name, parameter in named.items()}


def component_options(
    node: Mapping[str, Any], prefix: str = "", roles: frozenset[str] = frozenset()
) -> Iterator[Option]:
    """Yield every value below a plain node by its dotted key; what lies below an option has its roles too."""
    declared = declared_roles(node)
    for name, value in node.items():
        key, found = f"{prefix}{name}", roles | declared.get(name, frozenset())
        if isinstance(value, Mapping) and value:
            yield from component_options(value, f"{key}.", found)
        else:
            yield Option(key, value, found)


def free_keys(config: Mapping[str, Any]) -> set[str]:
    """Return the keys of a plain root configuration that its components let a continued run change."""
    return {option.key for option in component_options(config) if "Free" in option.roles}


def make_absolute(cfg: DictConfig) -> None:
    """Make every existing path of a root configuration absolute, in place; hub ids and urls stay as they are."""

    def absolute(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(absolute, value))
        return str(Path(value).absolute()) if isinstance(value, str) and is_existing_path(value) else value

    for key, value, roles in list(component_options(OmegaConf.to_container(cfg))):  # type: ignore[arg-type]
        if "File" in roles or key in LOOP_FILES:
            OmegaConf.update(cfg, key, absolute(value))
