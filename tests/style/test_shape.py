"""Functions and files stay small enough to read at once."""

from __future__ import annotations

import ast
import statistics

import pytest

from tests.style.source import PACKAGE, Function, library

MEDIAN_LINES = 12
USUAL_LINES = 40
USUAL_SHARE = 0.97
MOST_LINES = 80
MOST_LINES_OF_A_FILE = 400
MOST_FILES = {"": 8, "data": 22, "models": 20}
"""Python files directly in a folder of the package, its `__init__.py` too."""
MOST_ROOMS = 12
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


def lines(function: Function) -> int:
    """Count a function's lines from `def` to its end, its docstring too."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def docstring_lines(function: Function) -> int:
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def test_half_of_all_functions_have_at_most_twelve_lines_of_code() -> None:
    sizes = [lines(f) - docstring_lines(f) for file in library() for f in file.functions()]
    assert len(sizes) >= 100
    assert statistics.median(sizes) <= MEDIAN_LINES


def test_nearly_all_functions_fit_on_a_screen() -> None:
    sizes = {f"{file.name}:{f.name}:{f.lineno}": lines(f) for file in library() for f in file.functions()}
    long = {name: size for name, size in sizes.items() if size > USUAL_LINES}
    assert len(long) <= (1 - USUAL_SHARE) * len(sizes), long


def test_no_function_is_longer_than_eighty_lines() -> None:
    long = [
        f"{file.name}:{f.name}: {lines(f)}" for file in library() for f in file.functions() if lines(f) > MOST_LINES
    ]
    assert not long, "\n".join(long)


def test_no_file_is_longer_than_four_hundred_lines() -> None:
    sizes = {file.name: len(file.path.read_text().splitlines()) for file in library()}
    long = {name: size for name, size in sizes.items() if size > MOST_LINES_OF_A_FILE}
    assert not long, long


def test_no_file_is_a_drawer() -> None:
    drawers = [file.name for file in library() if file.path.stem in FORBIDDEN_NAMES]
    assert not drawers


@pytest.mark.parametrize("room", sorted(MOST_FILES))
def test_the_flat_level_of_a_room_fits_in_one_look(room: str) -> None:
    files = sorted(path.name for path in (PACKAGE / room).glob("*.py"))
    assert 1 < len(files) <= MOST_FILES[room], files


def test_rooms_are_few() -> None:
    rooms = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert 1 < len(rooms) <= MOST_ROOMS, rooms
