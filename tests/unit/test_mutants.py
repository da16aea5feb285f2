"""The mutants of the source: what is changed, and that only tests which pass without a mutant notice it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench.mutants import Judge, Mutant, mutants_of

SOURCE = '''"""A text of 3 < 4."""


def larger(a: int = 1, b: "Literal[2]" = 2) -> bool:
    log.info("%d", 5)
    if a and not b:
        raise ValueError(f"{a + b} is none of 6")
    return a < b
'''
PASSES = "def test_it():\n    assert True\n"
NOTICES = "from cascade_train.tasks.one import larger\n\ndef test_it():\n    assert not larger(2, 2)\n"


def checkout(folder: Path, test: str) -> list[Mutant]:
    source, unit = folder / "src/cascade_train/tasks/one.py", folder / "tests/unit/tasks/test_one.py"
    for path, text in ((source, SOURCE), (unit, test)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return list(mutants_of(source, folder / "src/cascade_train"))


def test_operators_constants_and_conditions_change_and_texts_stay(tmp_path: Path) -> None:
    mutants = checkout(tmp_path, PASSES)
    changes = {(mutant.before, mutant.after) for mutant in mutants}
    assert changes == {("1", "(2)"), ("2", "(3)"), ("a and not b", "(a or not b)"), ("a < b", "(a <= b)")}
    for mutant in mutants:
        ast.parse(SOURCE[: mutant.begin] + mutant.after + SOURCE[mutant.begin + len(mutant.before) :])


@pytest.mark.parametrize(
    ("test", "fails", "by"), [(NOTICES, False, "module"), (PASSES, False, "nobody"), (NOTICES, True, "nobody")]
)
def test_a_mutant_is_noticed_by_tests_that_pass_without_it(tmp_path, monkeypatch, test, fails, by) -> None:
    mutant = next(mutant for mutant in checkout(tmp_path, test) if mutant.before == "a < b")
    path = tmp_path / "src/cascade_train" / mutant.file
    monkeypatch.setattr(
        "bench.mutants.run_tests", lambda root, tests, seconds: fails or "<=" in path.read_text() and test == NOTICES
    )
    assert Judge(tmp_path, "module").judge(mutant) == by
    assert path.read_text() == SOURCE
