"""The configuration that a run or an export left, checked again before anything in it is built.

A run folder may come from someone else: which classes it may name is decided here, not by the folder.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from cascade_train.config.preflight import preflight
from cascade_train.config.schema import Root
from cascade_train.errors import ConfigError

CONFIG_NAME = "config.yaml"
TRUSTED_PACKAGES = ("cascade_train", "torch")


def load_saved_config(folder: Path, *, allow_any_target: bool = False) -> DictConfig:
    """Return the checked configuration of a run or of its export.

    Args:
        folder: a run, or its `export/`.
        allow_any_target: build classes of any package that the folder's configuration names.

    Raises:
        ConfigError: no such folder, no configuration in it, or one that does not pass preflight.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        reason = "no such folder" if not folder.is_dir() else f"no {CONFIG_NAME} in it"
        raise ConfigError(f"from={folder}: {reason}. Name the folder of a run, or the export/ that it left.")
    schema = OmegaConf.structured(Root)
    cfg = OmegaConf.merge(schema, OmegaConf.load(path))
    assert isinstance(cfg, DictConfig)
    cfg.run.allow_any_target = allow_any_target
    cfg.run.allowed_packages = list(TRUSTED_PACKAGES)
    cfg.train.micro_batch_size = None
    cfg.train.global_batch_size = 1
    return preflight(cfg, ranks=1)


def export_folder(folder: Path) -> Path:
    """Return the export of a run, or the folder itself where it is an export.

    Raises:
        ConfigError: the run has not written its export.
    """
    if (folder / "export").is_dir():
        return folder / "export"
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").is_dir():
        raise ConfigError(
            f"from={folder}: the run has not written its export yet. "
            f"Let it finish, or run python -m cascade_train.export from={folder}."
        )
    return folder
