"""Imports of one module of a package that would import all of its modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec


@contextmanager
def without_siblings(package: str) -> Iterator[None]:
    """Let modules of a package be imported within the block without the imports of the package's own file.

    A later import of the package, if it was not imported before, reuses these modules.
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
