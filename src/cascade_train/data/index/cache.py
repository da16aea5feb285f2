"""The cache of what was read from data: where its files lie, and how they are read and written."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cascade_train.errors import ConfigError
from cascade_train.files.durable import remove_abandoned, replacing
from cascade_train.files.untrusted import open_regular

_log = logging.getLogger(__name__)


def default_cache_dir(path: Path) -> Path:
    """Return `.cascade_train_index` beside a file or folder if that can be written, else the user's cache folder."""
    beside = path.resolve().parent / ".cascade_train_index"
    if os.access(beside if beside.is_dir() else beside.parent, os.W_OK):
        return beside
    return user_cache_dir()


def user_cache_dir() -> Path:
    """Return the user's cache folder for indexes, for data that has no folder to keep one beside."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cascade_train" / "index"


def cache_file(folder: Path, name: str, identity: str) -> Path:
    """Return the file of what is cached under a text that changes with its content."""
    return folder / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.npz"


def read_cache(cached: Path) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file; None if there is none, or it is damaged or may not be read."""
    try:
        with open_regular(cached) as file, np.load(file, allow_pickle=False) as parts:
            return dict(parts)
    except FileNotFoundError:
        return None
    except Exception as error:  # numpy and zipfile answer damage in many ways
        _log.warning("cached index %s is damaged or may not be read (%s); reading the data again", cached, error)
        return None


_clean = functools.cache(remove_abandoned)  # once: the folder may have an index of each of many tars


def write_cache(cached: Path, parts: Mapping[str, np.ndarray], *, required: bool) -> None:
    """Write arrays; processes may race. A ConfigError where they are required and cannot be written."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        _clean(cached.parent)
        with replacing(cached, racing=True, durable=False) as partial:
            np.savez(partial, **parts)  # type: ignore[arg-type] # numpy has a keyword of its own
    except OSError as error:
        if required:
            raise ConfigError(f"data.index_dir={cached.parent} cannot be written ({error}); choose another") from error
        _log.warning("the index of %s is not kept, since %s cannot be written (%s)", cached.stem, cached.parent, error)
