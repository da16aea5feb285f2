"""Which class a component must inherit from, and what its own class must define.

Read from source, before anything is imported (`broken_contract`). Where the source alone cannot tell, as for a class
made by a call, the imported class is checked in the same words (`check_imported`). Arguments live in components.py.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cascade_train.config.static.annotations import HYDRA_KEYS, is_component
from cascade_train.config.static.signatures import (
    bind_imported,
    class_chain,
    class_members,
    import_target,
    is_dataclass,
)
from cascade_train.config.static.static_source import Definition, UnreadableError, find
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


def broken_contract(path: str, target: str, bases: Sequence[str] = ()) -> str | None:
    """Return why the class that a target names cannot be used, as far as its source tells; None for no reason.

    It must inherit from one of `bases`, dotted paths, where there are any. Functions are checked by what they return.
    """
    try:
        made = find(target)
        chain, wanted = [*class_chain(made)], {base: [*class_chain(find(base))] for base in bases}
    except (ConfigError, UnreadableError):
        return None
    classes = [(each, each.node) for each in chain if isinstance(each.node, ast.ClassDef)]
    if not classes or any(node.keywords or len(node.decorator_list) > is_dataclass(each) for each, node in classes):
        return None  # a function, or a class that may be changed where it is made
    defined = {name for each in chain for name, is_open in class_members(each) if not is_open}
    found = [base for base in bases if wanted[base][0].node in [node for _, node in classes]]
    left = _open([*chain, *wanted[(found or bases)[0]]] if bases else chain)
    return _reason(path, target, classes[0][1].name, left - defined, () if found else bases)


def check_imported(path: str, node: Any, changed: Collection[str] = ()) -> None:
    """Import every class that a component, also given the arguments `changed`, and its nested ones name; check them.

    Raises:
        ConfigError: a target cannot be imported, does not keep its contract, or does not take its arguments.
    """
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ():
        check_imported(f"{path}.{key}", value)
    if is_component(node):
        target, unseen = node["_target_"], bool(node.get("_partial_") or node.get("_args_"))
        made = import_target(target, path=path)
        if isinstance(made, type):
            check_class(path, target, made)
        bind_imported(target, {*node, *changed} - HYDRA_KEYS, path=path, partial=unseen)


def check_class(path: str, target: str, made: type) -> None:
    """Check the imported class that a target names, or that of what it returned; see `broken_contract`."""
    bases, mro = CONTRACTS.get(path, ()), [f"{base.__module__}.{base.__qualname__}" for base in made.__mro__]
    found = [base for base in bases if base in mro]
    left = _open(class_chain(find((found or bases)[0]))) if bases else set()
    lacking = {name for name in left if not hasattr(made, name)} | getattr(made, "__abstractmethods__", frozenset())
    if reason := _reason(path, target, made.__name__, lacking, () if found else bases):
        raise ConfigError(reason)


def _reason(path: str, target: str, name: str, lacking: Collection[str], bases: Sequence[str]) -> str | None:
    """Return a paragraph on a class that lacks members, and a base where there are any; None where it lacks nothing."""
    names, who = ", ".join(sorted(lacking)), f"{path}._target_={target} cannot be used"
    if not bases:
        return f"{who}: {name} does not define {names}. Define what is missing." if names else None
    module, _, base = bases[0].rpartition(".")
    remedy = (
        f"Write 'from {module} import {base}' and 'class {name}({base})'{f', and define {names} in it' * bool(names)}"
    )
    if path == "optimizer":
        remedy = f"Choose optimizer=torch and optimizer.algorithm._target_={target}, or w{remedy[1:]}"
    any_of = " or ".join(each.rpartition(".")[2] for each in bases)
    return f"{who}: {name} does not inherit from {any_of}. {remedy}."


def _open(chain: Iterable[Definition]) -> set[str]:
    """Return what classes leave to those that inherit from them: abstract methods, and class variables."""
    return {name for each in chain for name, is_open in class_members(each) if is_open}
