"""Train; the word may be left out before key=value and options of Hydra.

    cascade-train train task=lora model=c_tiny

Declares no COMMAND: config/launch.py reads its arguments.
"""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from cascade_train.engine.run.lock import check_folder
from cascade_train.signals import while_importing


def train(cfg: DictConfig) -> int:
    """Train one checked configuration."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        check_folder(Path(cfg.run.dir).absolute())
    with while_importing():
        from cascade_train.assembly import run

    return run.train(cfg)
