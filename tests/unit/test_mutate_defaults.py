"""The bench that changes defaults: each change is one value, is noticed, and is taken back."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import cascade_train
from bench.mutate_defaults import JUDGES, applied, judge, others, python_changes, yaml_changes
from cascade_train.config.groups import conf_dir
from tests.unit.config import defaults, test_defaults


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that is composed in the place of conf/ itself."""
    shutil.copytree(conf_dir(), tmp_path / "conf")
    monkeypatch.setattr(cascade_train, "__file__", str(tmp_path / "src" / "cascade_train" / "__init__.py"))
    return tmp_path / "conf"


@pytest.mark.parametrize("value", [3, 0.0, 2.5, True, "gdf", [1, 16], [0.1, False], [[1], [2]]])
def test_a_default_is_changed_to_another_of_its_kind(value: object) -> None:
    changed = list(others(value, ["gdf", "edm"]))
    assert changed
    assert value not in changed
    assert {type(each) for each in changed} == {type(value)}


@pytest.mark.parametrize("file", ["noise/pyramid", "hydra/launcher/slurm"])
def test_every_change_of_a_file_is_one_value_and_is_noticed(file: str, copy: Path) -> None:
    before = defaults.shipped(file)
    changes = list(yaml_changes(defaults, file, copy))
    assert {change.key for change in changes} == set(defaults.defaults(file))
    for change in changes:
        with applied(change):
            after = defaults.shipped(file)
            assert [key for key in before if after[key] != before[key]] == [change.key]
            assert judge(change, test_defaults) != JUDGES[2]
    assert yaml.safe_load((copy / f"{file}.yaml").read_text()) == yaml.safe_load(
        (conf_dir() / f"{file}.yaml").read_text()
    )
    assert judge(replace(changes[0], after=changes[0].before), test_defaults) == JUDGES[2], "nothing is changed now"


def test_a_change_in_python_replaces_one_number_of_its_source() -> None:
    changes = list(python_changes(defaults, Path(cascade_train.__file__).parent))
    assert len(changes) >= len(defaults.python_defaults())
    for change in changes:
        before, after = change.path.read_text().splitlines(), change.text.splitlines()
        (line,) = (new for old, new in zip(before, after, strict=True) if old != new)
        assert repr(change.after) in line
