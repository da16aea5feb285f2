"""What is found out about files before torch is imported; it is asked again when the run opens and claims them."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from cascade_train.build.components import build_component
from cascade_train.engine.run_folder import check_folder


def check_files(cfg: DictConfig) -> None:
    """Check on rank 0 that the data is there and that the run can be written; the other ranks follow its exit.

    Raises:
        ConfigError: a file, a folder or a column is missing, or `run.dir` cannot be made.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    check_folder(Path(cfg.run.dir).absolute())
    try:
        build_component(cfg, "data").check()
        if cfg.validate.urls is not None:
            build_component(cfg, "data", urls=list(cfg.validate.urls)).check()
    except OSError:
        return  # `open` says of which file, and tells it from what is missing
