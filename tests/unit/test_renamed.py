"""Names of components that earlier versions used resolve to the components of today, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from cascade_train.config.targets import import_target, is_trusted
from cascade_train.engine.run.config_difference import find_differences
from cascade_train.renamed import RENAMED, current_target, first_target

FIRST = Path(__file__).parent / "first_targets.txt"
"""Every component that the first configurations and pages named."""

TARGETS = FIRST.read_text().split()

ORIGINALS = {
    f"cascade_train.diffusion.{name}"
    for name in ("schedule.StableDiffusionSchedule", "noise_condition.StableDiffusionCondition")
}
"""Of the original's objectives, which no configuration of ours named."""


def test_the_list_is_whole() -> None:
    assert len(TARGETS) == len(set(TARGETS)) >= 80
    moved = {name for target in TARGETS for name in (target, target.rpartition(".")[0]) if name in RENAMED}
    assert len(moved) == 17


@pytest.mark.parametrize("target", [*TARGETS, *sorted(ORIGINALS)])
def test_a_name_of_the_first_version_resolves(target: str) -> None:
    made = import_target(target)
    assert isinstance(made, type)
    assert import_target(current_target(target)) is made
    assert first_target(current_target(target)) == first_target(target) == target


def test_no_row_is_without_a_component() -> None:
    named = {*TARGETS, *(target.rpartition(".")[0] for target in TARGETS)} | ORIGINALS
    assert set(RENAMED) <= named


def test_a_folder_of_someone_else_may_name_a_component_as_before() -> None:
    assert is_trusted("cascade_train.models.stage_c.StageC")
    assert not is_trusted("cascade_train.models.formats.weights.open_weights")


def test_a_renamed_component_is_no_change_on_a_resume() -> None:
    old = {"model": {"_target_": "cascade_train.models.stage_c.StageC", "image_size": 32}}
    new = {"model": {"_target_": "cascade_train.models.cascade.stage_c.StageC", "image_size": 32}}
    assert find_differences(old, new) == []
    [other] = find_differences(old, {"model": {**new["model"], "_target_": "mine.StageC"}})
    assert other.key == "model._target_"
