"""Compare our code with the numbers of the original: every case and variant that lies in a folder.

python bench/parity.py --golden /path/to/cases
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

import torch
from transformers.utils import logging as transformers_logging

from bench.parity_case import Comparison, NotCoveredError, Outcome, Variant, compare, find_cases, variants
from bench.parity_cases import run
from cascade_train.errors import ConfigError

HEAD = ("case", "variant", "quantity", "error", "tolerance", "")
MANY = ("grad", "merged", "final", "final_ema")
"""First words of quantities that there are many of, one for each weight."""


@dataclass
class Report:
    """What was compared, and what was not and why; the latter by (case, reason)."""

    rows: list[tuple[Variant, Comparison]] = field(default_factory=list)
    not_covered: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    notes: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    @property
    def failures(self) -> int:
        """How many comparisons failed."""
        return sum(not row.passed for _, row in self.rows)


def measure(found: Iterable[Variant]) -> Report:
    """Run and compare variants; an error of our code is a failure, not an end."""
    report = Report()
    for variant in found:
        try:
            outcome = run(variant)
        except NotCoveredError as reason:
            report.not_covered.setdefault((variant.case.name, str(reason)), []).append(variant.name)
            continue
        except Exception as error:  # whatever our code raises on this variant, the others are still measured
            _refused(report, variant, error)
            continue
        _add(report, variant, outcome)
    return report


def _refused(report: Report, variant: Variant, error: Exception) -> None:
    if isinstance(error, ConfigError) and any(t.isnan().any() for t in variant.outputs.values()):
        reason = f"the original's result is NaN, ours is refused: {error}"
        report.not_covered.setdefault((variant.case.name, reason), []).append(variant.name)
        return
    problem = f"{type(error).__name__}: {error}".splitlines()[0]
    report.rows.append((variant, Comparison("all", float("nan"), 0.0, problem)))


def _add(report: Report, variant: Variant, outcome: Outcome) -> None:
    report.rows += [(variant, row) for row in compare(variant, outcome)]
    for note in outcome.notes:
        report.notes.setdefault((variant.case.name, note), []).append(variant.name)
    for name in variant.outputs:
        reason = outcome.reason(name)
        if reason is not None:
            quantity = f"{variant.name}: {summary(name)}"
            names = report.not_covered.setdefault((variant.case.name, reason), [])
            names += [] if quantity in names else [quantity]


def summary(quantity: str) -> str:
    """Return what quantities of the same kind are called together: step.03.x0 is step.*.x0."""
    first, _, rest = quantity.partition(".")
    return f"{first}.*" if rest and first in MANY else re.sub(r"(?<=[._])\d+(?=\.|$)", "*", quantity)


def table(rows: Sequence[tuple[Variant, Comparison]], *, full: bool) -> list[tuple[str, ...]]:
    """Return one line per quantity, or per kind of quantity with the worst of them."""
    kinds: dict[tuple[str, str, str], list[Comparison]] = {}
    for variant, row in rows:
        name = row.quantity if full else summary(row.quantity)
        kinds.setdefault((variant.case.name, variant.name, name), []).append(row)
    return [(case, name, _counted(kind, of), *_numbers(of)) for (case, name, kind), of in kinds.items()]


def _counted(kind: str, rows: Sequence[Comparison]) -> str:
    return kind if len(rows) == 1 else f"{kind} (worst of {len(rows)})"


def _numbers(rows: Sequence[Comparison]) -> tuple[str, str, str]:
    worst = max(rows, key=_badness)
    result = "ok" if worst.passed else f"FAILED {worst.problem or ''}".rstrip()
    return f"{worst.error:.2e}", f"{worst.tolerance:.2e}", result


def _badness(row: Comparison) -> tuple[bool, float]:
    share = 0.0 if row.error == 0.0 else row.error / row.tolerance if row.tolerance else float("inf")
    return not row.passed, share


def write(report: Report, *, full: bool) -> None:
    """Print the table, then notes, what is not covered, and the result."""
    lines = [HEAD, *table(report.rows, full=full)]
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    for line in lines:
        print("  ".join([*(text.ljust(w) for text, w in zip(line[:5], widths, strict=True)), line[5]]).rstrip())
    for title, found in (("Left out of a comparison", report.notes), ("Not covered", report.not_covered)):
        print(f"\n{title}:" if found else f"\n{title}: nothing")
        for (case, reason), names in found.items():
            print(f"- {case} ({', '.join(names)}): {reason}")
    print(f"\n{len(report.rows)} quantities compared, {report.failures} failed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 = all comparisons passed, 1 = one failed, 2 = there is nothing to compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--golden", type=Path, required=True, help="folder of cases, or one that holds `cases`")
    parser.add_argument("--case", action="append", help="run this case alone; may be given several times")
    parser.add_argument("--full", action="store_true", help="one line for every tensor")
    given = parser.parse_args(arguments)
    try:
        folders = find_cases(given.golden)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # as the original's numbers were made
    chosen = [folder for folder in folders if given.case is None or folder.name in given.case]
    report = measure(variant for folder in chosen for variant in variants(folder))
    write(report, full=given.full)
    if not report.rows:
        print("nothing was compared", file=sys.stderr)
        return 2
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
