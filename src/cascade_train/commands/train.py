"""Train; the word may be left out before key=value and options of Hydra.

    cascade-train train task=lora model=c_tiny

Declares no COMMAND: config/launch.py reads its arguments.
"""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from cascade_train.config.schema import Root
from cascade_train.errors import ConfigError
from cascade_train.signals import while_importing


def train(cfg: DictConfig) -> int:
    """Train one checked configuration."""
    if _is_alone():
        from cascade_train.engine.run.lock import check_folder

        check_folder(Path(cfg.run.dir).absolute())
    with while_importing():
        from cascade_train.assembly import run

    return run.train(cfg)


def checked(cfg: DictConfig) -> DictConfig:
    """Return a composed configuration as preflight does; a missing file is refused before torch is imported.

    Several ranks check files together later, so that all of them end with the same code. Opening the data checks again.
    """
    from cascade_train.config.preflight import preflight

    return preflight(cfg, check_data=check_data) if _is_alone() else preflight(cfg)


def check_data(root: Root) -> None:
    """Check that the data of a run exists; a ConfigError names what is missing."""
    from cascade_train.config.components import construct

    held_out = [] if root.validate.urls is None else [{**root.data, "urls": list(root.validate.urls)}]
    try:
        sources = [construct(node, "data") for node in [root.data, *held_out]]
    except ConfigError:
        return  # a value, not a file: refused where the run builds its parts, the model's first
    try:
        for source in sources:
            source.check()
    except OSError:
        return  # opening the data names the file


def _is_alone() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) == 1
