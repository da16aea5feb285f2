"""Train: `python -m cascade_train …`, `torchrun -m cascade_train …`, or the console script `cascade-train`.

Only the way in; composing lives in config/launch.py, training behind build.py.
"""

from __future__ import annotations

import sys

from cascade_train.config.launch import launch


def main() -> None:
    """Train what the command line describes and exit: 0 done, 1 stopped by the world, 2 refused."""
    sys.exit(launch(sys.argv[1:]))


if __name__ == "__main__":
    main()
