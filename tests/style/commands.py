"""Finds the commands of the documentation: fenced bash blocks, and overrides in the cells of tables."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from cascade_train.__main__ import is_training
from tests.style.source import ROOT

FENCE = re.compile(r"^```bash *([a-z-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OVERRIDE = re.compile(r"^[~+]*[a-z_]+([./@][a-z_/.]+)*=")
TRAINING = ("python -m cascade_train", "torchrun", "accelerate launch", "cascade-train", "sbatch")


@dataclass(frozen=True)
class Block:
    """A fenced bash block.

    Attributes:
        page: the file that holds it.
        line: where its text begins.
        runs: whether the test runs it; blocks marked `no-run` are read only.
        text: its commands.
    """

    page: Path
    line: int
    runs: bool
    text: str

    @property
    def commands(self) -> list[str]:
        """Return its commands, continuation lines joined, comments and empty lines left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def pages() -> list[Path]:
    """Return every page of documentation."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """Return the bash blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        if match[1] not in ("", "no-run"):
            raise ValueError(f"{page.name}: a bash block is marked {match[1]!r}; only no-run is known")
        found.append(Block(page, text.count("\n", 0, match.start(2)) + 1, match[1] == "", match[2]))
    return found


def training_overrides(command: str) -> list[str] | None:
    """Return the overrides of a training; None for other commands of `cascade-train` and of the shell."""
    if not command.startswith(TRAINING):
        return None
    words = shlex.split(command, comments=True)
    start = next((words.index(name) for name in ("cascade_train", "sbatch/train.sbatch") if name in words), 0)
    arguments = words[start + 1 :]
    return arguments if is_training(arguments) else None


def table_overrides(page: Path) -> list[list[str]]:
    """Return the overrides in the table cells of a page: each code span that begins like one."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    spans = [span.replace("\\|", "|") for row in rows for span in re.findall(r"`([^`]+)`", row)]
    words = [shlex.split(span) for span in spans if OVERRIDE.match(span.lstrip("'")) and "…" not in span]
    return [found for found in words if all("=" in word for word in found)]
