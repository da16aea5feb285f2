"""Fixtures that several folders of unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def world() -> Iterator[Any]:
    """A process group of one rank."""
    from cascade_train.distributed.process_group import process_group  # torch only where it is asked for

    with process_group() as world:
        yield world
