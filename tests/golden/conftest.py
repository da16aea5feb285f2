"""Loads reference cases: tensors and facts that the original code produced, see README.md.

A test class names its case by the attribute `case`; its tests run once per variant of that case.
CASCADE_GOLDEN names another folder of cases of the same layout.
"""

from __future__ import annotations

import fnmatch
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

CASES = Path(os.environ.get("CASCADE_GOLDEN", Path(__file__).parent / "cases"))


class Variant:
    """One variant of a case: its arguments, inputs, and expected outputs with their tolerances."""

    def __init__(self, case: Path, name: str) -> None:
        self.case, self.name = case, name
        facts = json.loads((case / "meta.json").read_text())
        self.args: dict[str, Any] = facts["variants"][name]["args"]
        self.facts: dict[str, Any] = facts["variants"][name]["json_out"]
        self._rules = facts["tolerances"]["rules"]

    def _group(self, group: str) -> dict[str, Tensor]:
        prefix = f"{self.name}/{group}/"
        with safe_open(self.case / "tensors.safetensors", framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a dict)
            return {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Input tensors by name."""
        return self._group("in")

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Expected tensors by name."""
        return self._group("out")

    @property
    def draws(self) -> list[Tensor]:
        """Recorded random numbers, in the order in which they were drawn."""
        return [value for name, value in sorted(self.inputs.items()) if name.startswith("draw.")]

    def check(self, got: dict[str, Tensor], rows: Tensor | slice = slice(None)) -> None:
        """Compare every expected tensor, or its given rows, with what was computed, within its tolerance."""
        expected = self.outputs
        assert expected.keys() == got.keys(), f"{self.name}: {sorted(expected.keys() ^ got.keys())}"
        for name, want in expected.items():
            rule = next(rule for rule in self._rules if fnmatch.fnmatch(name, rule["pattern"]))
            assert got[name].shape == want.shape, f"{self.name}/{name}: shape {tuple(got[name].shape)}"
            limit = rule["atol"] + rule["rel_absmax"] * float(want.abs().max())
            error = float((got[name].double() - want.double())[rows].abs().max())
            assert error <= limit, f"{self.name}/{name}: off by {error:.3g}, allowed {limit:.3g}"


def variants(case: str) -> list[Variant]:
    """Return all variants of a case."""
    folder = CASES / case
    return [Variant(folder, name) for name in json.loads((folder / "meta.json").read_text())["variants"]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `variant` once per variant of its class's case."""
    if "variant" in metafunc.fixturenames and hasattr(metafunc.cls, "case"):
        found = [v for v in variants(metafunc.cls.case) if metafunc.cls.takes(v)]
        metafunc.parametrize("variant", found, ids=[v.name for v in found])


@pytest.fixture
def variant_count(request: pytest.FixtureRequest) -> int:
    """How many variants the case of the test's class has; skips where another folder is given."""
    if "CASCADE_GOLDEN" in os.environ:
        pytest.skip("CASCADE_GOLDEN names other cases, of any number")
    return len([v for v in variants(request.cls.case) if request.cls.takes(v)])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
