"""What the canary decides: which packages to ask for, and which library a failure came out of."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def canary(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    monkeypatch.delitem(sys.modules, "setup_venv", raising=False)
    return importlib.import_module("canary")


@pytest.mark.parametrize(
    ("ours", "asked"),
    [("peft>=0.19,<0.22", "peft>=0.19"), ("moto[s3]>=5.2.5", "moto[s3]>=5.2.5"), ("pyyaml", "pyyaml")],
)
def test_upper_bounds_are_left_out(canary: ModuleType, ours: str, asked: str) -> None:
    assert canary.newest(ours) == asked


def test_all_that_a_setup_installs_is_asked_for(canary: ModuleType, repository: Path) -> None:
    asked = canary.requirements(tomllib.loads((repository / "pyproject.toml").read_text())["project"])
    names = {requirement.partition(">=")[0] for requirement in asked}
    assert {"torch", "diffusers", "pytest", "hydra-submitit-launcher", "pyarrow", "wandb", "moto[s3]"} <= names
    assert not [requirement for requirement in asked if "<" in requirement or "cascade-train" in requirement]


def test_failures_are_counted_by_library(canary: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.unit.a" name="test_one"><failure message="gone&#10;more">
src/cascade_train/a.py:3: in f
.venv/lib/python3.11/site-packages/hydra/main.py:7: in g
.venv/lib/python3.11/site-packages/_pytest/python.py:7: in h</failure></testcase>
        <testcase classname="tests.unit.a" name="test_two"/>
        <testcase classname="tests.unit.b" name="test_three"><error message="ours">
src/cascade_train/b.py:3: in f</error></testcase>
        </testsuite></testsuites>"""
    )
    failed = canary.failures(report)
    assert failed == {"hydra": ["tests.unit.a.test_one: gone"], "cascade_train": ["tests.unit.b.test_three: ours"]}
    changes = canary.changed_versions("a==1\nb==2\n", "a==1\nb==3\nc==4\n")
    assert changes == ["b 2 -> 3"]
    text = canary.page(changes, failed)
    assert "1 failed in hydra:\n  tests.unit.a.test_one: gone" in text
    assert "b 2 -> 3" in text
