"""What is measured on a GPU, without one: every case is one that the configuration allows, and gets its line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from cascade_train.config.launch import with_implied_choices
from tests.unit.config.composing import checked

STUB = """#!/usr/bin/env bash
case "$*" in
  *bench/train.py*"model=sdxl "*) echo "Error: no memory" >&2; exit 1 ;;
  *bench/train.py*)
    echo "$*" >>"$LOG"
    while [ "$1" != --out ]; do shift; done
    echo '{"step": []}' >"$2"
    echo "| run |"; echo "| --- |"; echo "| $4 |" ;;
  *pytest*) echo "22 passed" ;;
esac
"""
"""Stands for Python: the measurement of a case leaves its files, but that of SDXL fails."""


@pytest.fixture(scope="module")
def session(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """Return the folder of a session whose Python is a stub, and the arguments of each case that it measured."""
    folder = tmp_path_factory.mktemp("session")
    stub = folder / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    env = {**os.environ, "PYTHON": str(stub), "LOG": str(folder / "log"), "PEER": "checkout"}
    subprocess.run([repository / "bench/gpu_session.sh", folder / "out"], env=env, check=True, capture_output=True)
    return folder / "out", [shlex.split(line) for line in (folder / "log").read_text().splitlines()]


def test_every_case_composes(session: tuple[Path, list[list[str]]]) -> None:
    for arguments in session[1]:
        checked(*with_implied_choices(arguments[arguments.index("--") + 1 :]))


def test_every_case_gets_its_line_and_a_failure_its_reason(session: tuple[Path, list[list[str]]]) -> None:
    out, cases = session
    page = (out / "gpu.md").read_text()
    assert "`make gpu`: 22 passed" in page
    assert page.count("| run |") == 1
    assert page.count("\n| ") == len(cases) + 1 + 1  # a head and its rule
    assert "Ended with 1 (124: time was up): `-- task=lora model=sdxl" in page
    assert "Error: no memory" in page
    assert [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()] == [{"step": []}] * len(cases)
    assert sum("--peer checkout" in " ".join(arguments) for arguments in cases) == 1
