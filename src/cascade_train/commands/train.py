"""Train; the word may be left out before key=value and options of Hydra.

    cascade-train train task=lora model=c_tiny

Declares no COMMAND: its arguments are Hydra's, read by config/launch.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from cascade_train.errors import ConfigError
from cascade_train.signals import while_importing


def train(cfg: DictConfig) -> int:
    """Train one checked configuration. The loop is imported here, after every refusal."""
    check_files(cfg)
    with while_importing():
        from cascade_train.assembly import run

    return run.train(cfg)


def check_files(cfg: DictConfig) -> None:
    """Check before the loop is imported that the data exists and the run can be written, where this process is alone.

    Several ranks check it together later, so that all of them end with the same code. Opening the data checks again.

    Raises:
        ConfigError: a file, a folder or a column is missing, or `run.dir` cannot be made.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    from cascade_train.assembly.components import build_component
    from cascade_train.engine.run.lock import check_folder

    check_folder(Path(cfg.run.dir).absolute())
    try:
        sources = [build_component(cfg, "data")]
        if cfg.validate.urls is not None:
            sources.append(build_component(cfg, "data", urls=list(cfg.validate.urls)))
    except ConfigError:
        return  # a value, not a file: refused where the run builds its parts, the model's first
    try:
        for source in sources:
            source.check()
    except OSError:
        return  # opening the data names the file
