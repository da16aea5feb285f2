"""What a reference case is, what our code made of it, and how the two are compared.

Lives here: reading a folder of cases (tests/golden/README.md describes its layout) and tolerances. Must not live here:
how a case is run on our code (parity_cases.py names the module of each).
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


class NotCoveredError(Exception):
    """A variant, or a part of it, that our code does not compute; the message says why."""


class Variant:
    """One variant of a case: its arguments, inputs, and expected outputs with their tolerances.

    Attributes:
        case: folder of the case.
        name: of the variant.
        args: constructor and call arguments in the original's words.
        facts: results that are not tensors.
    """

    def __init__(self, case: Path, name: str) -> None:
        self.case, self.name = case, name
        self._meta = json.loads((case / "meta.json").read_text())
        self.args: dict[str, Any] = self._meta["variants"][name]["args"]
        self.facts: dict[str, Any] = self._meta["variants"][name].get("json_out", {})

    def __repr__(self) -> str:
        return f"{self.case.name}/{self.name}"

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """Input tensors by name."""
        return self._group(self.name, "in")

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        """Expected tensors by name."""
        return self._group(self.name, "out")

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Weights under the original's names; some variants borrow another's."""
        return self._group(self._meta["variants"][self.name].get("weights_variant") or self.name, "w")

    @property
    def draws(self) -> list[Tensor]:
        """Recorded random numbers, in the order in which they were drawn."""
        return [value for name, value in sorted(self.inputs.items()) if name.startswith("draw.")]

    def tolerance(self, name: str) -> float:
        """Return the largest error that the case allows of an expected tensor."""
        rules = self._meta.get("tolerances", {}).get("rules", [])
        rule = next((rule for rule in rules if fnmatch.fnmatch(name, rule["pattern"])), None)
        if rule is None:
            raise KeyError(f"{self}: no tolerance for {name}")
        return float(rule["atol"] + rule["rel_absmax"] * _largest(self.outputs[name]))

    def _group(self, variant: str, group: str) -> dict[str, Tensor]:
        prefix = f"{variant}/{group}/"
        path = self.case / "tensors.safetensors"
        if not path.is_file():
            return {}
        with safe_open(path, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a dict)
            return {name.removeprefix(prefix): tensors.get_tensor(name) for name in names}


@dataclass(frozen=True)
class Comparison:
    """One quantity: its largest error, what is allowed, and what went wrong if no number can say it."""

    quantity: str
    error: float
    tolerance: float
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the error is allowed; NaN never is."""
        return self.problem is None and self.error <= self.tolerance


@dataclass
class Outcome:
    """What our code made of a variant.

    Attributes:
        got: by the name of the expected tensor.
        masks: by the name of an expected tensor, which of its elements are compared; absent = all. Broadcasts.
        left_out: pattern of expected names that our code does not compute, and why.
        facts: comparisons of results that are not tensors.
        notes: what the comparison leaves out on purpose, for the report.
    """

    got: dict[str, Tensor]
    masks: dict[str, Tensor] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    facts: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def reason(self, name: str) -> str | None:
        """Return why an expected tensor is left out; None = it is not."""
        return next((why for pattern, why in self.left_out.items() if fnmatch.fnmatch(name, pattern)), None)


def compare(variant: Variant, outcome: Outcome) -> list[Comparison]:
    """Compare every expected tensor that is not left out; nothing is skipped in silence."""
    rows = list(outcome.facts)
    for name, expected in variant.outputs.items():
        if outcome.reason(name) is None:
            rows.append(_compare(variant, name, expected, outcome.got.get(name), outcome.masks.get(name)))
    unasked = sorted(outcome.got.keys() - variant.outputs.keys())
    rows.extend(Comparison(name, float("nan"), 0.0, "the case expects no such tensor") for name in unasked)
    return rows


def check(variant: Variant, outcome: Outcome) -> None:
    """Raise AssertionError unless every comparison passes and there is at least one."""
    rows = compare(variant, outcome)
    assert rows, f"{variant}: nothing was compared"
    failed = [f"{row.quantity}: {row.problem or describe(row)}" for row in rows if not row.passed]
    assert not failed, f"{variant}: " + "; ".join(failed)


def describe(row: Comparison) -> str:
    """Return a comparison's numbers in words."""
    return f"off by {row.error:.3g}, allowed {row.tolerance:.3g}"


def fact(name: str, got: float | None, expected: float | None, tolerance: float) -> Comparison:
    """Compare two numbers, of which None means that there is none."""
    if got is None or expected is None:
        problem = None if got is expected else f"is {got}, expected {expected}"
        return Comparison(name, 0.0 if problem is None else float("nan"), tolerance, problem)
    return Comparison(name, abs(got - expected), tolerance)


def _compare(variant: Variant, name: str, expected: Tensor, got: Tensor | None, mask: Tensor | None) -> Comparison:
    limit = variant.tolerance(name)
    if got is None:
        return Comparison(name, float("nan"), limit, "not computed")
    if got.shape != expected.shape:
        return Comparison(name, float("nan"), limit, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    difference = (got.detach().double() - expected.double()).abs()
    if mask is not None:
        difference = difference[mask.expand_as(difference)]
    return Comparison(name, float(difference.max()) if difference.numel() else 0.0, limit)


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def variants(case: Path) -> list[Variant]:
    """Return all variants of a case."""
    return [Variant(case, name) for name in json.loads((case / "meta.json").read_text())["variants"]]


def find_cases(folder: Path) -> list[Path]:
    """Return the cases that lie in a folder, or in its `cases`, by name.

    Raises:
        FileNotFoundError: there is none.
    """
    for place in (folder, folder / "cases"):
        found = sorted(path.parent for path in place.glob("*/meta.json"))
        if found:
            return found
    raise FileNotFoundError(f"{folder}: holds no case; a case is a folder with meta.json and tensors.safetensors")


def recorded(draws: Mapping[str, Tensor], kind: str) -> list[Tensor]:
    """Return the recorded draws of one kind (`randn_like`, `rand`, `np_rand`, ...), in order."""
    return [value for name, value in sorted(draws.items()) if name.startswith("draw.") and name.endswith(f".{kind}")]


def stack(tensors: list[Tensor]) -> Tensor:
    """Stack fp32 tensors along a new first axis, without gradient."""
    return torch.stack([tensor.detach().float() for tensor in tensors])
