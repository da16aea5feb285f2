"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.style.source import PACKAGE, ROOT, SourceFile, in_rooms, library

CONFIG_FILES = sorted((ROOT / "conf").rglob("*.yaml"))
RUNS_SOMETHING = re.compile(r"(python -m|torchrun|cascade-train|make) ?\S*")


def calls_of(file: SourceFile, names: set[str]) -> list[str]:
    return [
        f"{file.name}:{node.lineno} .{node.func.attr}()"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names
    ]


def test_losses_never_wait_for_the_device() -> None:
    files = in_rooms("tasks", "diffusion")
    assert len(files) >= 8
    broken = [call for file in files for call in calls_of(file, {"item"})]
    assert not broken, "\n".join(broken)


def test_only_commands_print() -> None:
    broken = [
        f"{file.name}:{node.lineno}"
        for file in library()
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and file.room not in ("commands", "__main__")
    ]
    assert not broken, "\n".join(broken)


def undocumented(file: SourceFile) -> list[str]:
    """Return the file itself and its public classes and functions that lack a docstring (private parents hide)."""
    missing = [] if ast.get_docstring(file.tree) or not file.tree.body else [file.name]

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_"):
                continue
            if not ast.get_docstring(node) and not overrides(node):
                missing.append(f"{file.name}:{node.lineno} {prefix}{node.name}")
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")

    visit(file.tree.body, "")
    return missing


def overrides(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a method is marked as keeping the documented contract of its base class."""
    return any(isinstance(d, ast.Name) and d.id in ("override", "overload") for d in node.decorator_list)


def test_everything_public_is_documented() -> None:
    missing = [name for file in library() for name in undocumented(file)]
    assert not missing, "\n".join(missing)


def test_nothing_hides_behind_a_bare_except() -> None:
    broken = [
        f"{file.name}:{node.lineno}"
        for file in library()
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not broken, "\n".join(broken)


def test_nan_is_never_replaced() -> None:
    broken = [call for file in library() for call in calls_of(file, {"nan_to_num", "nan_to_num_"})]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_config_file_says_what_it_is_and_the_command_that_runs_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    first, second, *_ = [line for line in lines if not line.startswith("# @package")] + ["", ""]
    assert first.startswith("# "), "the first line says what the file is"
    assert len(first.split()) >= 3, "the first line says what the file is"
    assert second.startswith("# "), "the second line is the command that runs it"
    assert RUNS_SOMETHING.search(second), "the second line is the command that runs it"


SECOND_FAMILY = re.compile(r"stable[ _-]?diffusion|sdxl|condition_?unet", re.IGNORECASE)
MAY_NAME_IT = {
    "models/stable_diffusion/": "the family itself",
}


def test_the_second_family_is_named_in_its_folder_alone() -> None:
    named = {
        file.path.relative_to(PACKAGE).as_posix() for file in library() if SECOND_FAMILY.search(file.path.read_text())
    }
    assert {place for place in MAY_NAME_IT if any(name.startswith(place) for name in named)} == MAY_NAME_IT.keys()
    assert not {name for name in named if not name.startswith(tuple(MAY_NAME_IT))}


FAMILIES = ("models/cascade/", "models/stable_diffusion/")
OF_A_FAMILY = re.compile(r"(?:from|import) cascade_train\.models\.(?:cascade|stable_diffusion)\b")


def test_a_family_is_imported_in_its_folder_alone() -> None:
    """Others reach it by what a configuration names, and by what its stages can do."""
    importing = {
        file.path.relative_to(PACKAGE).as_posix() for file in library() if OF_A_FAMILY.search(file.path.read_text())
    }
    assert len(importing) > 20
    assert not {name for name in importing if not name.startswith(FAMILIES)}
