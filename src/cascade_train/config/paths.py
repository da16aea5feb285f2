"""Paths on a command line and in a configuration. Which options hold any, components declare: static/roles.py."""

from __future__ import annotations

from pathlib import Path


def is_existing_path(text: str) -> bool:
    """Return whether a text names a file or a folder; false for what no file system takes as a name."""
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):
        return False
