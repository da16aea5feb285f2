"""cascade_train: composed research training for every part of Stable Cascade.

    from cascade_train import compose, evaluate, generate, plan, train

Little is imported before a function is asked for: `cascade-train` starts through this package too.
"""

from typing import TYPE_CHECKING, Any

from cascade_train.errors import ConfigError, RunError

if TYPE_CHECKING:
    from cascade_train.commands.parts.python import Run, compose, evaluate, generate, plan, train

__version__ = "1.0.0.dev0"
__all__ = ["ConfigError", "Run", "RunError", "compose", "evaluate", "generate", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cascade_train.commands.parts import python

    return getattr(python, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
