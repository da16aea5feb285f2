"""The mutants of the source: what is changed, and that only tests which pass without a mutant notice it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from coverage import CoverageData

from bench.mutants import Coverage, Judge, Mutant, mutants_of, run_tests

SOURCE = '''"""A text of 3 < 4."""


def larger(a: int = 1, b: "Literal[2]" = 2) -> bool:
    log.info("%d", 5)
    if a and not b:
        raise ValueError(f"{a + b} is none of 6")
    return a < b
'''
TESTS = """import pytest
from cascade_train.tasks.one import larger

def test_that_fails_in_a_fork():
    assert False

def test_it():
    assert not larger(2, 2)
"""
FAILS, NOTICES = (f"tests/unit/tasks/test_one.py::{name}" for name in ("test_that_fails_in_a_fork", "test_it"))


def checkout(folder: Path) -> list[Mutant]:
    source, unit = folder / "src/cascade_train/tasks/one.py", folder / "tests/unit/tasks/test_one.py"
    for path, text in ((source, SOURCE), (unit, TESTS)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return list(mutants_of(source, folder / "src/cascade_train"))


def coverage(folder: Path, *contexts: tuple[str, list[int]]) -> Coverage:
    data = CoverageData(folder / "covered")
    for context, lines in contexts:
        data.set_context(context)
        data.add_lines({"src/cascade_train/tasks/one.py": lines})
    data.write()
    return Coverage(folder, folder / "covered")


def test_operators_constants_and_conditions_change_and_texts_stay(tmp_path: Path) -> None:
    mutants = checkout(tmp_path)
    changes = {(mutant.before, mutant.after) for mutant in mutants}
    assert changes == {("1", "(2)"), ("2", "(3)"), ("a and not b", "(a or not b)"), ("a < b", "(a <= b)")}
    for mutant in mutants:
        ast.parse(SOURCE[: mutant.begin] + mutant.after + SOURCE[mutant.begin + len(mutant.before) :])


def test_a_mutant_is_tried_by_the_tests_of_its_line_or_of_its_module_where_it_runs_at_import(tmp_path: Path) -> None:
    by_change = {mutant.before: mutant for mutant in checkout(tmp_path)}
    fixture = ("b.py::one|setup", [6]), ("b.py::two|run", [5])
    covered = coverage(tmp_path, ("", [4]), ("a.py::far|run", [5, 6, 8]), (f"{NOTICES}|run", [5, 8]), *fixture)
    assert covered.tests(by_change["a < b"]) == [NOTICES, "a.py::far"]
    assert covered.tests(by_change["a and not b"]) == ["a.py::far", "b.py::one", "b.py::two"], "a fixture of b.py"
    assert covered.tests(by_change["1"]) == [NOTICES, "a.py::far", "b.py::one", "b.py::two"]


@pytest.mark.parametrize(
    ("failing", "by"),
    [
        ({NOTICES: True}, ("lines", NOTICES)),
        ({FAILS: False, NOTICES: True}, ("lines", NOTICES)),
        ({FAILS: False}, ("nobody", "")),
        ({}, ("nobody", "")),
    ],
    ids=["noticed", "noticed by the second", "fails without it, too", "passed"],
)
def test_a_mutant_is_noticed_by_the_first_test_that_passes_without_it(tmp_path, monkeypatch, failing, by):
    mutant = next(mutant for mutant in checkout(tmp_path) if mutant.before == "a < b")
    path = tmp_path / "src/cascade_train" / mutant.file

    def run(root: Path, tests: list[str], seconds: float) -> str | None:
        is_changed = path.read_text() != SOURCE
        return next((each for each in tests if each in failing and (is_changed or not failing[each])), None)

    monkeypatch.setattr("bench.mutants.run_tests", run)
    covered = coverage(tmp_path, (f"{FAILS}|run", [8]), (f"{NOTICES}|run", [8]))
    assert Judge(tmp_path, covered, "lines").judge(mutant) == by
    assert path.read_text() == SOURCE


@pytest.mark.slow
def test_tests_run_in_a_fork_say_which_failed_first(tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text("import time\n\ndef test_a():\n    pass\n\ndef test_b():\n    assert False\n"
                    "\ndef test_c():\n    time.sleep(60)\n\ndef test_d():\n    import os; os._exit(1)\n")  # fmt: skip
    ids = {name: f"test_some.py::test_{name}" for name in "abcd"}
    assert run_tests(tmp_path, [ids["a"]], 60) is None
    assert run_tests(tmp_path, [ids["a"], ids["b"]], 60) == ids["b"]
    assert run_tests(tmp_path, [ids["c"]], 5) == "time"
    assert run_tests(tmp_path, [ids["d"]], 60) == ids["d"], "the process died"
