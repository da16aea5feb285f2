"""Train; the word may be left out before key=value and options of Hydra.

    cascade-train train task=lora model=c_tiny

Declares no COMMAND: its arguments are Hydra's, read by config/launch.py.
"""

from __future__ import annotations

import os

from omegaconf import DictConfig

from cascade_train.assembly.early import check_files
from cascade_train.signals import while_importing


def train(cfg: DictConfig) -> int:
    """Train one checked configuration. Torch and everything above it are imported here, after every refusal."""
    check_files(cfg)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else C++ stack traces precede the message of a rank
    with while_importing():
        from cascade_train.assembly import run

    return run.train(cfg)
