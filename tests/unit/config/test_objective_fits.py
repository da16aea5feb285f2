"""Objectives that do not score what a task trains of a model are refused before anything is loaded."""

import pytest

from cascade_train.errors import ConfigError
from tests.unit.config.composing import checked


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reconstruction", "a_tiny", "gdf"],
            r"Objective is for something.*back into pictures in stage_a.*fit: vqgan\.",
        ),
        (["reconstruction", "a_tiny", "preview"], r"Preview is for something else.*Objectives that fit: vqgan\."),
        (
            ["reconstruction", "b_tiny", "vqgan"],
            r"Vqgan is for something.*what denoises in stage_b.*fit: adaptive, .*gdf",
        ),
        (
            ["reconstruction", "b_tiny", "preview"],
            r"Preview is for something else.*Objectives that fit: adaptive, .*gdf",
        ),
        (["reconstruction", "c_tiny", "gdf"], r"Objective is for something.*pictures in stage_c.*that fit: preview\."),
        (["reconstruction", "c_tiny", "vqgan"], r"Vqgan is for something else.*that fit: preview\."),
        (["finetune", "c_tiny", "preview"], r"Preview is for something.*Finetune trains.*fit: adaptive, edm"),
    ],
)
def test_an_objective_for_something_else_is_refused(overrides, message):
    task, model, objective = overrides
    with pytest.raises(ConfigError, match=message):
        checked(f"task={task}", f"model={model}", f"objective={objective}")
