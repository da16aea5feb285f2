"""Paths in a configuration and on a command line; a saved configuration names the same files from any folder.

Must not live here: paths of data, which are read where they were written, and of the run itself.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

FILE_KEYS = ("weights", "backbone_weights", "detector", "recogniser", "tokenizer")
"""Keys of a model or a task, at any depth, that name a file, a folder or a hub id."""


def is_existing_path(text: str) -> bool:
    """Return whether a text names a file or a folder; false for what no file system takes as a name."""
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):
        return False


def make_absolute(node: DictConfig) -> None:
    """Make every existing path in a node absolute, in place; hub ids and what is not set stay as they are."""
    for key in node:
        if OmegaConf.is_missing(node, key):
            continue
        value = node[key]
        if isinstance(value, DictConfig):
            make_absolute(value)
        elif key in FILE_KEYS and isinstance(value, str) and Path(value).exists():
            node[key] = str(Path(value).absolute())
