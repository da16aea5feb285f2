"""Every number that ships is the original's, or is listed with the reason why it is not.

That compositions have the listed values: test_every_option.py, with what else is asked of each.
"""

from __future__ import annotations

import ast

import pytest

from tests.unit.config import test_every_option
from tests.unit.config.composing import composed
from tests.unit.config.defaults import (
    CHOSEN,
    PUBLISHED,
    RECIPES,
    canonical,
    differences,
    inherited,
    listed,
    only_defaults,
    python_defaults,
    python_expression,
    recipe_values,
    shipped,
    shipped_files,
)


@pytest.mark.parametrize("file", [each for each in shipped_files() if not each.rpartition("/")[2].startswith("_")])
def test_every_default_of_a_file_is_in_a_list(file: str) -> None:
    found, lists = only_defaults(shipped(file)), inherited(file)
    unlisted = [key for key in found if key not in lists]
    assert not unlisted, f"add them to tests/golden/original/chosen.yaml, with the reason: {unlisted}"
    changed = {key: value for key, value in found.items() if canonical(key, value) != canonical(key, lists[key])}
    assert not changed


def test_every_default_in_python_is_in_a_list() -> None:
    found, lists = python_defaults(), listed("python")
    assert len(found) > 30
    assert [name for name in found if name not in lists] == []
    assert {name: ast.literal_eval(python_expression(name)) for name in lists} == lists


@pytest.mark.slow
def test_the_lists_speak_of_what_ships_and_give_reasons() -> None:
    named = {file for entry in CHOSEN for file in entry["values"]} | set(PUBLISHED) - {"recipe"}
    assert named <= {*shipped_files(), "python"}
    assert {f"experiment/{name}" for name in RECIPES} <= set(shipped_files())
    assert len(RECIPES) == 11
    assert all(len(entry["reason"]) > 20 for entry in CHOSEN)
    stale = [f"{f}: {key}" for e in CHOSEN for f in e["values"] if f != "python" for key in e["values"][f]
             if key not in shipped(f)]  # fmt: skip
    assert not stale
    both = [f"{f}: {key}" for e in CHOSEN for f in e["values"] for key in e["values"][f]
            if key in PUBLISHED.get(f, {}) and "original" not in e["reason"]]  # fmt: skip
    assert not both, "what differs from the original says so in its reason"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_ships_has_every_value_of_the_official_file(name: str) -> None:
    values = {k: v for k, v in recipe_values(name).items() if not k.startswith("defaults.")}
    assert not differences(composed(*test_every_option.overrides("experiment", name)), values)
