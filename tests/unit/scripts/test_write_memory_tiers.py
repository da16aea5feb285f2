"""The tables of memory say what is computed today, for a part of their rows."""

import pytest

from scripts import write_memory_tiers as tiers

pytestmark = pytest.mark.slow

AGAIN = "run: python scripts/write_memory_tiers.py"


def cheap(rows, part):
    """Rows, of which `make recipes` computes those of large networks."""
    return [row if part in row[1] else pytest.param(*row, marks=pytest.mark.recipes) for row in rows]


def test_the_choices_of_memory_are_those_of_the_page():
    assert tiers.row("c_1b", "lora") in tiers.PAGE.read_text().split("\n"), AGAIN


@pytest.mark.parametrize(("name", "overrides"), cheap(tiers.LEAST, "c_1b"))
def test_what_needs_little_is_computed_as_the_page_says(name: str, overrides: str):
    assert tiers.least(name, overrides) in tiers.PAGE.read_text().split("\n"), AGAIN


@pytest.mark.parametrize(("name", "overrides"), cheap(tiers.SPLIT, "model=c_1b task=lora"))
def test_the_table_of_several_devices_is_fresh(name: str, overrides: str):
    assert tiers.split(name, overrides) in tiers.SCALE.read_text().split("\n"), AGAIN
