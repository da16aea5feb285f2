"""The generated tables of groups, keys and commands name all of them."""

from __future__ import annotations

import re

import pytest

from cascade_train.config.groups import commands, group_options
from cascade_train.config.schema import Root
from scripts import write_reference
from tests.style.source import ROOT


@pytest.mark.parametrize("page", list(write_reference.PAGES))
def test_every_mark_of_a_page_becomes_a_table(page: str) -> None:
    text = write_reference.with_tables(page, (ROOT / "docs" / page).read_text())
    assert ": generated -->" not in text
    assert text.count("\n|") > 50


def test_every_key_has_its_line_and_default() -> None:
    lines = list(write_reference.keys())
    assert (
        "| `train.max_grad_norm` | `1.0` | Global gradient norm above which gradients are scaled down; null = off |"
        in lines
    )
    assert len(lines) > 60
    nodes = {line.split("`")[1].split(".")[0] for line in lines[2:]}
    assert nodes == set(Root.__dataclass_fields__) - {"model", "task", "objective", "data", "optimizer", "lr_scheduler"}


def test_every_option_has_its_line() -> None:
    listed = {tuple(re.findall("`([^`]+)`", line)[:2]) for line in write_reference.groups() if "`" in line}
    files = [path for path in (ROOT / "conf").glob("*/*.yaml") if not path.stem.startswith("_")]
    assert len(files) > 60
    assert listed == {(path.parent.name, path.stem) for path in files}


def test_every_option_of_a_component_has_its_keys() -> None:
    lines = list(write_reference.components())
    assert "| `task.rank` | `4` | of every adapter, >= 1 |" in lines
    assert any(line.startswith("| `task.filter.high` | `200` |") for line in lines)
    unexplained = [line for line in lines if line.endswith("|  |")]
    assert len(lines) > 400
    assert len(unexplained) < 12


def test_every_command_has_its_options() -> None:
    lines = list(write_reference.command_options())
    assert {line.removeprefix("## ") for line in lines if line.startswith("## ")} == commands().keys() - {"train"}
    assert any(line.startswith("| `from` | must be given |") for line in lines)
    assert any(line.startswith("| `seed` | `0` | Seed of the starting noise;") for line in lines)
    assert not any("<" in re.sub("`[^`]*`", "", line) for line in lines)


def test_every_class_of_an_objective_is_on_its_page() -> None:
    text = (ROOT / "docs/objectives.md").read_text()
    kinds = ("Schedule", "Scaling", "Target", "Condition", "LossWeight")
    sources = (ROOT / "src/cascade_train/diffusion").glob("*.py")
    classes = [name for path in sources for name in re.findall(r"^class (\w+)\(", path.read_text(), re.MULTILINE)]
    parts = [name for name in classes if name.endswith(kinds) and name not in kinds and not name.startswith("_")]
    assert len(parts) > 30
    assert [name for name in parts if name not in text and name != "NoiseCondition"] == []


def test_every_objective_is_on_its_page() -> None:
    text = (ROOT / "docs/objectives.md").read_text()
    assert [name for name in group_options("objective") if f"`objective={name}`" not in text] == []


def test_a_page_that_lost_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="docs/keys.md has no line <!-- components: generated -->"):
        write_reference.with_tables("keys.md", "")
