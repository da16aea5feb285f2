"""Every number of the original that ships is the original's."""

from __future__ import annotations

import inspect
import re

import pytest

from cascade_train.config.targets import import_target
from tests.unit.config.composing import composed
from tests.unit.config.defaults import MOUNTS, PUBLISHED, RECIPES, differences, recipe_values
from tests.unit.config.test_every_option import overrides

FILES = [file for file in PUBLISHED if "/" in file and not file.endswith("_base")]


@pytest.mark.parametrize("file", FILES)
def test_an_option_has_the_published_values(file: str) -> None:
    group, option = file.split("/")
    place = MOUNTS.get(group, f"{group}.")
    values = {f"{place}{key}": row["value"] for key, row in PUBLISHED[file].items()}
    assert not differences(composed(*overrides(group, option)), values)


def test_the_root_and_every_source_have_the_published_values() -> None:
    values = {key: row["value"] for key, row in PUBLISHED["config"].items()}
    values |= {f"data.{key}": row["value"] for key, row in PUBLISHED["data/_base"].items()}
    assert not differences(composed(*overrides("data", "webdataset")), values)


@pytest.mark.parametrize("name", PUBLISHED["python"])
def test_a_number_in_python_is_the_published_one(name: str) -> None:
    path, argument = re.fullmatch(r"([\w.]+)(?:\((\w+)\))?", name).groups()
    found = import_target(f"cascade_train.{path}")
    value = inspect.signature(found).parameters[argument].default if argument else found
    assert value == PUBLISHED["python"][name]["value"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_ships_has_every_value_of_the_official_file(name: str) -> None:
    values = {key: value for key, value in recipe_values(name).items() if not key.startswith("defaults.")}
    assert not differences(composed(*overrides("experiment", name)), values)


def test_enough_is_published() -> None:
    assert len(RECIPES) == 11
    assert sum(map(len, PUBLISHED.values())) > 250
