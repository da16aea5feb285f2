"""What a `_target_` may name within this library and torch: components, and nothing that could be misused.

Found in the sources, by where a thing is defined, whatever path leads to it; nothing is imported.
"""

from __future__ import annotations

import ast

from cascade_train.config.static.signatures import inherits
from cascade_train.config.static.static_source import UnreadableError, find
from cascade_train.errors import ConfigError

TRUSTED = (
    "cascade_train.data",
    "cascade_train.diffusion",
    "cascade_train.engine.lr_schedule",
    "cascade_train.engine.optimizer",
    "cascade_train.filters",
    "cascade_train.models",
    "cascade_train.tasks",
    "torch.optim",
)
"""Where the classes lie that anyone's folder may name: their constructors check and store, and do nothing else."""

ENGINE_BASES = ("cascade_train.engine.lr_schedule.LrSchedule", "torch.optim.optimizer.Optimizer")
"""What the classes inherit from that it may name in other files of the engine."""

ALSO_FOR_TRAINING = ("torch.nn",)
"""Where the classes lie that a configuration of one's own may name besides."""

FUNCTIONS = ("cascade_train.filters.torch_network.load_exported",)
"""The functions that it may name: they read what the user gives them."""

CONFINED = ("cascade_train", "torch")
"""Packages that every configuration may name, and so only in part: torch alone can download code and run it."""


def is_trusted(target: str) -> bool:
    """Return whether a target is a class that even a stranger's folder may name."""
    return _is_class_in(target, TRUSTED)


def check_confined(path: str, target: str) -> None:
    """Check that a target of this library or torch is one of the components.

    Raises:
        ConfigError: it names something else.
    """
    if target.partition(".")[0] not in CONFINED or target in FUNCTIONS:
        return
    if not _is_class_in(target, (*TRUSTED, *ALSO_FOR_TRAINING)):
        raise ConfigError(
            f"{path}._target_={target} is no component. Of torch a configuration may name the classes of torch.optim "
            "and torch.nn, of cascade_train those of its components: anything else could run code that it "
            "brings. If you trust it: run.allow_any_target=true."
        )


def _is_class_in(target: str, places: tuple[str, ...]) -> bool:
    """Return whether a target is a class that is defined at or below one of these places."""
    try:
        definition = find(target)
    except (ConfigError, UnreadableError):
        return False
    home = f"{definition.module.name}."
    if home.startswith("cascade_train.engine.") and any(inherits(definition, base) for base in ENGINE_BASES):
        return True
    return isinstance(definition.node, ast.ClassDef) and any(home.startswith(f"{place}.") for place in places)
