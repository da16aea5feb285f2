"""Hold the methods of users' classes to those of this library that they replace: what they take, and what they return.

The library's own are held by mypy. What a class must define, and inherit from, stands in targets.py.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any, SupportsFloat, SupportsIndex, Union, get_args, get_origin, get_type_hints

from cascade_train.errors import RunError

LENIENT: dict[Any, Any] = {float: SupportsFloat, int: SupportsIndex, list: Collection, dict: Mapping, frozenset: Set}
"""What a method may return for a type."""


def replaced_methods(made: Any) -> Iterator[tuple[type, str, type]]:
    """Yield what a class and its bases replace of this library or torch: user's class, method, replaced class."""
    for place, own in enumerate(getattr(made, "__mro__", ())):
        bases = [each for each in made.__mro__[place + 1 :] if _package(each) in ("cascade_train", "torch")]
        for name, method in list(vars(own).items()) if _package(own) not in ("cascade_train", "torch") else ():
            base = next((each for each in bases if inspect.isfunction(vars(each).get(name))), None)
            if base is not None and inspect.isfunction(method) and (name == "__call__" or not name.startswith("__")):
                yield own, name, base


def wrong_arguments(made: Any) -> str | None:
    """Return a sentence on the first method that does not take what it is called with; None where all do."""
    for own, name, base in replaced_methods(made):
        given, wanted = (inspect.signature(vars(each)[name]) for each in (own, base))
        needed = [p for p in wanted.parameters.values() if p.default is p.empty or _package(base) == "cascade_train"]
        for by_name in (True, False):  # what has a default is given by its name, or in its place
            named = [p.name for p in needed if p.kind is p.KEYWORD_ONLY or (by_name and p.default is not p.empty)]
            with suppress(TypeError):
                given.bind(*[p for p in needed if p.name not in named], **dict.fromkeys(named))
                break
        else:
            return (
                f"{own.__name__}.{name}{_plain(given)} does not take the arguments of {base.__name__}.{name}. Write "
                f"'def {name}{_plain(wanted)}'."
            )
    return None


def hold_returns(made: Any) -> None:
    """Have the methods of users' classes raise a RunError where they return another type than what they replace."""
    for own, name, base in replaced_methods(made):
        with suppress(NameError):  # of a type that is imported for type checkers alone
            hint = get_type_hints(vars(base)[name]).get("return", Any) if _package(base) == "cascade_train" else Any
            if hint not in (Any, type(None)) and not hasattr(vars(own)[name], "held"):
                setattr(own, name, _held(vars(own)[name], hint, inspect.signature(vars(base)[name]).return_annotation))


def _held(method: Callable[..., Any], hint: Any, written: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def held(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if not is_a(result, hint):
            kinds = ", ".join(type(each).__name__ for each in (result if isinstance(result, tuple) else [result]))
            raise RunError(f"{method.__qualname__} must return {written}, and returned a value of type {kinds}.")
        return result

    vars(held)["held"] = True
    return held


def is_a(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type, as far as can be said without running it; in doubt it is."""
    origin, items = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return any(is_a(value, item) for item in items)
    if not isinstance(origin, type) or origin is object or getattr(origin, "_is_protocol", False):
        return True
    if isinstance(value, str) != (origin is str) or not isinstance(value, LENIENT.get(origin, origin)):
        return False
    if not items or not isinstance(value, Collection):
        return True
    held = list(value.values() if isinstance(value, Mapping) else value)
    wanted = items if origin is tuple and ... not in items else [items[0 if ... in items else -1]] * len(held)
    return len(held) == len(wanted) and all(map(is_a, held, wanted))


def _package(made: type) -> str:
    return made.__module__.partition(".")[0]


def _plain(found: inspect.Signature) -> str:
    bare = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))
