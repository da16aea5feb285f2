"""Objectives and models that have nothing to say to each other are refused before anything is loaded."""

import pytest

from cascade_train.errors import ConfigError
from tests.unit.config.composing import checked


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=a_tiny", "objective=gdf"], r"Objective is for models that denoise.*fit it: vqgan\."),
        (["model=b_tiny", "objective=vqgan"], r"Vqgan is for models that reconstruct.*fit it: adaptive, .*gdf"),
    ],
)
def test_an_objective_of_another_kind_of_model_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        checked("task=reconstruction", *overrides)
