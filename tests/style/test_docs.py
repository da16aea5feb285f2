"""What the documentation says is true: its overrides compose, its paths and links exist; commands run elsewhere."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from cascade_train.__main__ import launch
from cascade_train.commands.download import runs_of
from cascade_train.commands.parts.command_line import parse
from cascade_train.config.saved import composed
from tests.style.commands import Block, blocks_of, pages, table_overrides, training_overrides
from tests.style.source import ROOT

PAGES = pages()
READ_ONLY = [block for page in PAGES for block in blocks_of(page) if not block.runs]
LEFT_ALONE = ("git ", "cd ", "apt-get install ", "python3 -m venv", "pip install", ".venv/bin/", "wandb ")
"""Beginnings of commands in read-only blocks that this test does not look into."""


def compose(overrides: list[str]) -> int:
    """Compose a configuration in this process, with the tiny LoRA as default, and show it instead of running it."""
    chosen = {word.split("=")[0] for word in overrides}
    if not chosen & {"experiment", "+experiment"}:
        overrides = [word for word in ("task=lora", "model=c_tiny") if word.split("=")[0] not in chosen] + overrides
    return launch(["--cfg", "job", *overrides])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("block", READ_ONLY, ids=lambda block: f"{name_of(block.page)}:{block.line}")
def test_read_only_commands_are_at_least_valid(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in block.commands:
        overrides = training_overrides(command)
        if overrides is not None:
            assert compose(overrides) == 0, f"{command}\n{capsys.readouterr()}"
        elif (words := shlex.split(command))[0] == "cascade-train":
            check_command(words[1], words[2:])
        elif command.startswith("make "):
            assert command.split()[1] in targets, f"{command}: the Makefile has no such verb"
        else:
            assert command.startswith(LEFT_ALONE), f"{command}: this test cannot judge it; make the block run"


def check_command(name: str, words: list[str]) -> None:
    """Check the arguments of a command that does not train: its own parse, and those of a run compose."""
    declared = import_module(f"cascade_train.commands.{name}").COMMAND
    own = [word for word in words if word.partition("=")[0] in {f.name for f in fields(declared.arguments)}]
    takes_run = declared.run_defaults is not None
    rest = [word for word in words if word not in own] if declared.takes_rest or takes_run else []
    parse(declared.arguments, own if rest else words)
    for overrides in runs_of(rest) if declared.takes_rest else []:
        composed(overrides)
    assert not takes_run or compose(rest) == 0


def at_once(rows: list[list[str]]) -> list[list[list[str]]]:
    """Return rows of overrides in groups that may be composed together: those that set keys, each key once."""
    together: list[list[str]] = []
    alone = []
    keys: set[str] = set()
    for row in rows:
        own = {override.partition("=")[0] for override in row}
        if keys.isdisjoint(own) and all(re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) for key in own):
            together.append(row)
            keys |= own
        else:
            alone.append([row])
    return [together, *alone]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if table_overrides(page)], ids=name_of)
def test_overrides_in_tables_compose(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    failed = []
    for rows in at_once(table_overrides(page)):
        if len(rows) > 1 and compose([override for row in rows for override in row]) == 0:
            continue
        for overrides in rows:
            capsys.readouterr()
            if compose(overrides):
                failed.append(f"{' '.join(overrides)}\n{capsys.readouterr().err}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken


def test_every_page_is_linked_from_the_tour() -> None:
    linked = set(re.findall(r"\]\((\w[\w.-]*\.md)\)", (ROOT / "docs/index.md").read_text()))
    pages_there = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert len(pages_there) > 15
    assert pages_there <= linked


def test_the_script_of_the_first_lora_trains_as_its_page_says() -> None:
    script = re.split(r"[\s()]+", (ROOT / "scripts/first_lora.sh").read_text())
    commands = [command for block in blocks_of(ROOT / "docs/first-lora.md") for command in block.commands]
    trainings = [overrides for each in commands if "run.name=" in each and (overrides := training_overrides(each))]
    tiny = [overrides for overrides in trainings if "model=c_tiny" in overrides]
    assert len(tiny) == 3
    said = {word for overrides in tiny for word in overrides if not word.startswith(("train.max_steps=", "sample."))}
    assert said - set(script) == set()
    assert {"train.max_steps=300", "train.max_steps=800"} <= set(script)


def test_every_recipe_is_on_its_page() -> None:
    text = (ROOT / "docs/recipes.md").read_text()
    recipes = [path.stem for path in (ROOT / "conf/experiment").glob("[!_]*.yaml")]
    assert len(recipes) > 15
    assert [name for name in recipes if f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_in_the_text_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|conf|docs|scripts|\.ci)/[\w./-]+)`", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
