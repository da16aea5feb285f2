"""Imports of one module of a package that would import all of its modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec


@contextmanager
def without_siblings(package: str) -> Iterator[None]:
    """Let modules of a package be imported within the block without what the package's own file imports.

    Afterwards the package counts as not imported; a later import of it reuses these modules. Does nothing where it is
    imported already.
    """
    if package in sys.modules:
        yield
        return
    spec = find_spec(package)
    assert spec is not None, package
    sys.modules[package] = module_from_spec(spec)  # made, and not run
    try:
        yield
    finally:
        del sys.modules[package]
