"""Objectives that do not score what a task trains of a model are refused before anything is loaded."""

import pytest

from cascade_train.errors import ConfigError
from tests.unit.config.composing import checked


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reconstruction", "a_tiny", "gdf"],
            r"objective=gdf does not train model=a_tiny .* but b_3b, b_700m or b_tiny\.",
        ),
        (
            ["reconstruction", "a_tiny", "preview"],
            r"does not train model=a_tiny \(stage_a\) but c_1b, c_3b or c_tiny\.",
        ),
        (["reconstruction", "a_tiny", "gdf"], r"For model=a_tiny, choose objective=vqgan\.$"),
        (["reconstruction", "b_tiny", "vqgan"], r"^task=reconstruction with objective=vqgan .* but a or a_tiny\."),
        (
            ["reconstruction", "b_tiny", "preview"],
            r"choose objective=adaptive, debiased, edm, .*, v or x0\.$",
        ),
        (["reconstruction", "c_tiny", "gdf"], r"b_700m or b_tiny\. For model=c_tiny, choose objective=preview\.$"),
        (["reconstruction", "c_tiny", "vqgan"], r"For model=c_tiny, choose objective=preview\.$"),
        (
            ["finetune", "c_tiny", "preview"],
            r"does not train model=c_tiny \(stage_c\)\. .*objective=adaptive, debiased, edm",
        ),
        (
            ["finetune", "sd_tiny", "gdf"],
            r"^objective.noise_condition=CosineTimeCondition gives the network a time for noise level, and that of "
            r"model=sd_tiny was made for a timestep\. "
            r"Choose objective=ddpm, ddpm_debiased, ddpm_min_snr, ddpm_v, edm or edm_sdxl\.$",
        ),
        (["finetune", "c_tiny", "ddpm_v"], r"Choose objective=adaptive, debiased, edm, edm_sdxl, gdf, .*, v or x0\.$"),
        (
            ["reconstruction", "sd_tiny", "ddpm"],
            r"task=reconstruction trains .*but model=sd_tiny is stable_diffusion\.",
        ),
        (["reconstruction", "sdxl_tiny", "ddpm"], r"Tasks that fit stable_diffusion_xl: controlnet, finetune, lora;"),
    ],
)
def test_an_objective_for_something_else_is_refused(overrides, message):
    task, model, objective = overrides
    with pytest.raises(ConfigError, match=message):
        checked(f"task={task}", f"model={model}", f"objective={objective}")
