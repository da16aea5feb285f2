"""Train: `python -m cascade_train …`, `torchrun -m cascade_train …`, or the console script `cascade-train`.

Only the way in; composing lives in config/launch.py, training behind build/. What is imported here comes before the
handlers of signals, so it is little.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cascade_train.signals import set_handlers, stop_at_once, while_importing

if TYPE_CHECKING:
    from omegaconf import DictConfig

COMMANDS = ("cache", "checkpoints", "export", "generate", "inspect", "merge", "pack", "recipe", "shapes")


def main() -> None:
    """Train what the command line describes and exit: 0 done, 1 the world, 2 refused, 75 stopped, 130 interrupted."""
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        command = importlib.import_module(f"cascade_train.commands.{sys.argv.pop(1)}")
        sys.exit(command.main())
    set_handlers(stop_at_once)
    code = launch(sys.argv[1:])
    set_handlers(lambda *_: os._exit(code))  # the run has ended: nothing changes its code any more
    sys.exit(code)


def launch(argv: Sequence[str]) -> int:
    """Train what `argv` describes and return the exit code."""
    from cascade_train.config.launch import compose_and_run

    return compose_and_run(argv, train)


def train(cfg: DictConfig) -> int:
    """Train one checked configuration. Torch and everything above it are imported here, after every refusal."""
    from cascade_train.assembly.early import check_files

    check_files(cfg)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else stacks of C++ frames come before what a rank says
    with while_importing():
        from cascade_train.assembly import run

    return run.train(cfg)


if __name__ == "__main__":
    main()
