"""A library that is not installed is named with the extra that brings it."""

from __future__ import annotations

import importlib.util

import pytest

from cascade_train.errors import ConfigError
from cascade_train.filters.canny import CannyFilter
from cascade_train.filters.parts.libraries import require


def test_a_filter_without_its_library_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    require("cv2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"needs OpenCV, which is not installed. Install it, .*: pip install --editable '\.\[filters\]'",
    ):
        CannyFilter(resize=None, low=1, high=2)
