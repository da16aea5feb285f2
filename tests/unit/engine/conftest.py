"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cascade_train.distributed.process_group import World, process_group


@pytest.fixture
def world() -> Iterator[World]:
    """A process group of one rank."""
    with process_group() as world:
        yield world
