"""The page on the architecture follows the source: short lists, of files that exist, and every room in its picture."""

from __future__ import annotations

import re

import pytest

from tests.style.source import PACKAGE, ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
WAYS = re.findall(r"^## (The way .*?)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
MOST_STEPS = 10


def test_the_page_shows_three_ways() -> None:
    assert len(WAYS) == 3


@pytest.mark.parametrize(("title", "text"), WAYS)
def test_a_way_leads_through_few_files_that_exist(title: str, text: str) -> None:
    steps = re.findall(r"^\d+\. `([^`]+)`: (.+)$", text, re.MULTILINE)
    assert 1 < len(steps) <= MOST_STEPS, title
    assert len(steps) == len(text.strip().splitlines())
    assert [path for path, _ in steps if not (ROOT / path).is_file()] == []


def test_every_rule_names_a_test_that_exists() -> None:
    tests = re.findall(r"^\| .* \| `(tests/[^`]+)` \|$", PAGE, re.MULTILINE)
    assert len(tests) >= 10
    assert [path for path in tests if not (ROOT / path).is_file()] == []


def test_every_room_is_in_the_picture() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    picture = PAGE.partition("```\n")[2].partition("```")[0]
    assert len(rooms) >= 10
    assert {room for room in rooms if f"{room}/" not in picture} == set()
