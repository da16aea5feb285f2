"""What is found out about files before torch is imported; it is asked again when the run opens and claims them."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from cascade_train.assembly.components import build_component
from cascade_train.engine.run.folder import check_folder
from cascade_train.errors import ConfigError


def check_files(cfg: DictConfig) -> None:
    """Check that the data is there and that the run can be written, where this process is alone.

    Several ranks find that out together, once they have met, so that all of them end with the same code.

    Raises:
        ConfigError: a file, a folder or a column is missing, or `run.dir` cannot be made.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
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
        return  # `open` says of which file, and tells it from what is missing
