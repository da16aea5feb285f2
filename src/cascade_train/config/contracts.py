"""What a class must inherit from, define, take and return to be used as a component.

Methods of users' classes are compared with those of this library that they replace; the library's own are checked by
mypy.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, SupportsFloat, SupportsIndex, Union, get_args, get_origin, get_type_hints

from cascade_train.config.arguments import items_match
from cascade_train.config.targets import import_target, inherited
from cascade_train.errors import RunError

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

LENIENT: dict[Any, Any] = {float: SupportsFloat, int: SupportsIndex, list: Collection, dict: Mapping, frozenset: Set}
"""What a method may return for a type."""


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
    reason = wrong_arguments(made)
    return None if reason is None else f"{who}: {reason}"


def _left_open(made: type) -> set[str]:
    """Return what a class leaves to those that inherit from it: abstract methods, class variables without a value."""
    hints = [item for base in made.__mro__ for item in inspect.get_annotations(base).items()]
    without = {name for name, hint in hints if "ClassVar" in str(hint) and not hasattr(made, name)}
    return without | set(getattr(made, "__abstractmethods__", ()))


def replaced_methods(made: Any) -> Iterator[tuple[type, str, type]]:
    """Yield what a class and its bases replace of this library or torch: user's class, method, replaced class."""
    for place, own in enumerate(getattr(made, "__mro__", ())):
        bases = [each for each in made.__mro__[place + 1 :] if _package(each) in ("cascade_train", "torch")]
        for name, method in list(vars(own).items()) if _package(own) not in ("cascade_train", "torch") else ():
            base = next((each for each in bases if inspect.isfunction(vars(each).get(name))), None)
            if base is not None and inspect.isfunction(method) and (name == "__call__" or not name.startswith("__")):
                yield own, name, base


def wrong_arguments(made: type) -> str | None:
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
                f"{own.__name__}.{name}{without_types(given)} does not take the arguments of {base.__name__}.{name}. "
                f"Write 'def {name}{without_types(wanted)}'."
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
    return not isinstance(value, Collection) or items_match(value, origin, items, is_a)


def _package(made: type) -> str:
    return made.__module__.partition(".")[0]


def without_types(found: inspect.Signature) -> inspect.Signature:
    """Return a signature without annotations, for messages."""
    bare = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    return found.replace(parameters=bare, return_annotation=found.empty)
