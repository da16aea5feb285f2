"""cascade_train: composed research training for every part of Stable Cascade.

    from cascade_train import compose, evaluate, generate, plan, train

Nothing is imported before a name is asked for: `cascade-train` starts through this package too.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cascade_train.commands.parts.python import Run, compose, evaluate, generate, plan, train
    from cascade_train.errors import ConfigError, RunError

__version__ = "0.1.0"
__all__ = ["ConfigError", "Run", "RunError", "compose", "evaluate", "generate", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cascade_train import errors
    from cascade_train.commands.parts import python

    return getattr(errors if name.endswith("Error") else python, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
