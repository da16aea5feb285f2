"""Fixtures that several folders of unit tests share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from cascade_train.config.preflight import EXTRAS


@pytest.fixture
def world() -> Iterator[Any]:
    """A process group of one rank."""
    from cascade_train.distributed.process_group import process_group  # torch only where it is asked for

    with process_group() as world:
        yield world


@pytest.fixture
def every_extra_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find the library of every extra, whatever is installed here."""
    find_spec = importlib.util.find_spec
    extras = {library for choices in EXTRAS.values() for library in choices.values()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name in extras else find_spec(name))
