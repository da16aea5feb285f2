"""Every switch that docs/differences.md names composes, passes preflight, and changes something."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.unit.config.composing import checked

PAGE = Path(__file__).resolve().parents[3] / "docs" / "differences.md"
ALREADY = {"objective.shift=1"}
"""What the page names though it is so by default."""


def switches() -> list[str]:
    """Return the overrides in the last column, those of one code span together."""
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    spans = [span for row in rows for span in re.findall("`([^`]+)`", row[-1] if len(row) == 4 else "")]
    return [span for span in spans if re.match(r"'?[a-z@_.]+=", span)]


def split(span: str) -> tuple[list[str], list[str]]:
    """Return choices of groups, and keys with values."""
    words = shlex.split(span)
    keys = [word for word in words if "." in word.partition("=")[0] and "@" not in word]
    return [word for word in words if word not in keys], keys


def context(span: str) -> list[str]:
    """Return what a span needs to be composed: its own choices first, then those that it takes for granted."""
    groups, keys = split(span)
    task = "lora" if any(key.startswith("task.") for key in keys) else "finetune"
    chosen = {group.partition("=")[0] for group in groups}
    more = [f"{group}={option}" for group, option in {"task": task, "model": "c_1b"}.items() if group not in chosen]
    return [*groups, *more, "data=webdataset", "data.urls=[a.tar]"]


as_it_is = functools.cache(checked)


def test_the_page_names_switches() -> None:
    assert len(switches()) == 24


@pytest.mark.parametrize("span", switches())
def test_a_switch_composes_and_changes_something(span: str) -> None:
    _, keys = split(span)
    assert keys
    default, switched = as_it_is(*context(span)), checked(*context(span), *keys)
    for key in keys:
        if key not in ALREADY:
            path = key.partition("=")[0]
            assert OmegaConf.select(default, path) != OmegaConf.select(switched, path), key
