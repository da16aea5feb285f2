"""Finds the copied reference cases, see README.md. CASCADE_GOLDEN names another folder of cases of the same layout.

A test class names its case by the attribute `case`; its tests run once per variant of that case.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bench.parity_case import variants

CASES = Path(os.environ.get("CASCADE_GOLDEN", Path(__file__).parent / "cases"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `variant` once per variant of its class's case."""
    if "variant" in metafunc.fixturenames and hasattr(metafunc.cls, "case"):
        found = [v for v in variants(CASES / metafunc.cls.case) if metafunc.cls.takes(v)]
        metafunc.parametrize("variant", found, ids=[v.name for v in found])


@pytest.fixture
def variant_count(request: pytest.FixtureRequest) -> int:
    """How many variants the case of the test's class has; skips where another folder is given."""
    if "CASCADE_GOLDEN" in os.environ:
        pytest.skip("CASCADE_GOLDEN names other cases, of any number")
    return len([v for v in variants(CASES / request.cls.case) if request.cls.takes(v)])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
