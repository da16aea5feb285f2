"""What docs/troubleshooting.md quotes is what a user reads.

Its `$` commands run here, in one process; messages without a command are looked up in the source.
"""

from __future__ import annotations

import ast
import re
import shlex
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from cascade_train.__main__ import launch
from cascade_train.commands.shapes import ShapesArgs, write_shapes
from tests.style.commands import OVERRIDE
from tests.style.source import ROOT, library, text_of
from tests.style.test_docs import compose

PAGE = ROOT / "docs/troubleshooting.md"
BLOCK = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = PAGE.read_text().split("\n### ")[1:]
QUOTED = [(section.partition("\n")[0], block) for section in SECTIONS for block in BLOCK.findall(section)]


def exchanges(block: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a block with the lines of output below it; one without a command has the command ""."""
    for part in re.split(r"^\$ cascade-train ", block, flags=re.MULTILINE):
        command, _, output = part.partition("\n") if block.startswith("$") else ("", "", part)
        if part.strip():
            yield command, output.splitlines()


def fragments(lines: list[str]) -> list[str]:
    """Return what lines quote, without what varies (…), white space made single."""
    return [" ".join(piece.split()) for line in lines for piece in line.split("…") if piece.strip()]


@cache
def literals() -> str:
    """Return the literal parts of all texts of the library, one a line."""
    nodes = (node for file in library() for node in ast.walk(file.tree))
    return "\n".join(" ".join(text.split()) for node in nodes for text in text_of(node))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the data that the commands of the page name."""
    monkeypatch.chdir(tmp_path)
    [tar] = write_shapes(ShapesArgs(out="shapes", samples=16))
    with tarfile.open(tar) as opened:
        opened.extractall("damaged", filter="data")
    tar.rename("train.tar")
    pictures = sorted(Path("damaged").glob("*.png"))[:4]
    with tarfile.open("no_captions.tar", "w") as without, tarfile.open("unsorted.tar", "w") as unsorted:
        for path in pictures:
            without.add(path, path.name)
        for path in [*pictures, *(picture.with_suffix(".txt") for picture in pictures)]:
            unsorted.add(path, path.name)
    for path in pictures:
        path.write_bytes(b"no picture")


def test_the_page_answers_what_users_ask_most() -> None:
    assert len(SECTIONS) >= 20
    assert sum(block.startswith("$") for _, block in QUOTED) >= 5


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("title", "block"), [each for each in QUOTED if each[1].startswith("$")])
def test_a_command_says_what_the_page_quotes(title: str, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, lines in exchanges(block):
        code = launch(shlex.split(command))
        said = " ".join(capsys.readouterr().err.split())
        assert bool(code) == bool(lines), f"{title}: {command}: {code}\n{said}"
        assert [each for each in fragments(lines) if each not in said] == [], f"{title}: {command}\n{said}"


@pytest.mark.parametrize(("title", "block"), [each for each in QUOTED if not each[1].startswith("$")])
def test_a_message_without_a_command_is_in_the_source(title: str, block: str) -> None:
    found = fragments(block.splitlines())
    assert found
    assert [each for each in found if each not in literals()] == [], title


@pytest.mark.slow
def test_overrides_of_the_answers_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prose = BLOCK.sub("", PAGE.read_text())
    spans = {span for span in re.findall(r"`([^`\n]+)`", prose) if OVERRIDE.match(span) and not span.endswith("=")}
    assert len(spans) >= 15
    assert [span for span in sorted(spans) if compose(shlex.split(span))] == []
