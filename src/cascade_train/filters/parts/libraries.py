"""Libraries that some filters need and that are installed on demand, by the extra `filters`."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

from cascade_train.errors import ConfigError, install_hint

PACKAGES = {"cv2": "OpenCV", "onnxruntime": "onnxruntime"}
"""What people call each library."""


def require(library: str) -> None:
    """Check that a library of the extra is installed, without importing it.

    Raises:
        ConfigError: it is not; names the extra.
    """
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"task.filter: this filter needs {PACKAGES[library]}, which is not installed. {install_hint('filters')}."
        )


@cache
def opencv() -> Any:
    """Import OpenCV, and keep it on one thread: each data worker has one core, and OpenCV's threads survive no fork."""
    import cv2

    cv2.setNumThreads(0)
    return cv2
