"""Whether a folder may become a run's; asked before torch is imported, and again when the run claims it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cascade_train.errors import ConfigError

CONFIG = "config.yaml"
"""The file that makes a folder a run's."""


def check_folder(directory: Path) -> None:
    """Check that a folder is a run's already, or can be made one; leaves nothing behind.

    Raises:
        ConfigError: it holds something else, or nothing can be written there.
    """
    if (directory / CONFIG).is_file():
        return
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(
            f"run.dir={directory} exists, is not empty and is not a run (it has no {CONFIG}). "
            "Remedy: another run.name or run.dir, or move it away"
        )
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise not_writable(directory, error) from error


def not_writable(directory: Path, error: OSError) -> ConfigError:
    """Return the refusal of a folder that cannot be made."""
    return ConfigError(f"run.dir={directory} cannot be made: {error.strerror or error}. Remedy: a writable run.dir")
