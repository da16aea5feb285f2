"""The commands of the documentation run, page by page, each page in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import emoji_pictures
from tests.style.commands import blocks_of, pages
from tests.style.source import ROOT
from tests.warm.programs import warm_programs

RUNNING = [page for page in pages() if any(block.runs for block in blocks_of(page))]
SECONDS = 300
"""Of a block of commands."""

EXPORTED = re.compile(r'^export (\w+)="(.*)"$', re.MULTILINE)
LACKING = {"tutorial.md": emoji_pictures.missing}
"""What a page needs beside the set-up: None, or what is to be installed."""


def environment() -> dict[str, str]:
    """Return this environment with warm programs (tests/warm) first on the PATH, then those of the set-up."""
    path = [str(warm_programs()), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(path)}


def test_enough_pages_run() -> None:
    assert len(RUNNING) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_run_in_their_order(page: Path, tmp_path: Path) -> None:
    if page.name in LACKING and (wanted := LACKING[page.name]()) is not None:
        pytest.skip(f"the pictures of {page.name} need {wanted}")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")  # pages are read in a checkout
    exported: dict[str, str] = {}
    for block in blocks_of(page):
        if not block.runs:
            continue
        exported |= dict(EXPORTED.findall(block.text))
        command = ["bash", "-euo", "pipefail", "-c", block.text]
        env = environment() | exported
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, f"{page.name}:{block.line}\n{block.text}\n{done.stdout}\n{done.stderr}"
