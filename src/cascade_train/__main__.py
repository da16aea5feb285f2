"""Train: `python -m cascade_train …`, `torchrun -m cascade_train …`, or the console script `cascade-train`.

Only the way in; composing lives in config/launch.py, training behind build/.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from omegaconf import DictConfig

from cascade_train.config.launch import compose_and_run


def main() -> None:
    """Train what the command line describes and exit: 0 done, 1 the world, 2 refused, 75 stopped, 130 interrupted."""
    sys.exit(launch(sys.argv[1:]))


def launch(argv: Sequence[str]) -> int:
    """Train what `argv` describes and return the exit code."""
    return compose_and_run(argv, train)


def train(cfg: DictConfig) -> int:
    """Train one checked configuration. Torch and everything above it are imported here, after every refusal."""
    from cascade_train.build.early import check_files

    check_files(cfg)
    from cascade_train.build import run

    return run.train(cfg)


if __name__ == "__main__":
    main()
