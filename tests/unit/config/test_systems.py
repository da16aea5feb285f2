"""The recipes of other trainers do what these trainers' code does, or name the difference and its reason.

The rows lie in tests/golden/original/systems.yaml and were read from the trainers' source; no importer is asked.
"""

from __future__ import annotations

import re

import pytest

from tests.unit.config.composing import checked
from tests.unit.config.defaults import SYSTEM_OF, SYSTEMS, differences, differing, rows_of
from tests.unit.config.test_every_option import NEEDED

DECIDING = {
    "run.seed", "train.global_batch_size", "train.max_grad_norm", "train.precision", "train.master_weights",
    "ema.decay", "optimizer.lr", "optimizer.algorithm._target_", "optimizer.algorithm.betas",
    "optimizer.algorithm.eps", "optimizer.weight_decay", "optimizer.decay", "optimizer.scale_lr",
    "lr_scheduler._target_", "lr_scheduler.warmup_steps", "lr_scheduler.from_zero", "task.cond_drop_prob", "data.crop",
    "data.flip_prob",
    "data.aspect_ratios", "data.replacement", "model.image_size", "model.text_encoder.train",
    "model.text_encoder.hidden_layer", "model.vae.sample_posterior", "model.vae.scaling_factor",
    "objective.schedule._target_", "objective.timestep_bias.strategy", "objective.target._target_",
    "objective.loss_weight._target_", "objective.offset_noise", "objective.input_perturbation",
}  # fmt: skip
"""What decides numbers in every training, so that each recipe has a row for it."""


@pytest.mark.parametrize(("recipe", "system"), SYSTEM_OF.items())
def test_a_recipe_does_what_its_trainers_code_does(recipe: str, system: str) -> None:
    choice = f"experiment={recipe}"
    different = differences(checked(choice, *NEEDED[choice]), rows_of(system, recipe))
    assert {key: found for key, (found, _) in different.items()} == differing(recipe)


@pytest.mark.parametrize(("recipe", "system"), SYSTEM_OF.items())
def test_whatever_decides_numbers_has_a_row(recipe: str, system: str) -> None:
    assert DECIDING - rows_of(system, recipe).keys() == set()


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_names_its_place_in_the_source(system: str) -> None:
    entry = SYSTEMS[system]
    assert re.fullmatch(r"[0-9a-f]{40}", entry["commit"])
    rows = [*entry["rows"].values(), *(row for each in entry["recipes"].values() for row in each.values())]
    assert len(rows) > 15
    for row in [*rows, *entry["asked"].values()]:
        assert re.match(r"[\w/-]+\.(py|yaml|md)(:\w|, )", row["source"]), row
    assert all(len(each["reason"]) > 20 for each in entry["differs"].values())
    assert all(each["switch"] for each in entry["asked"].values())


def test_a_default_that_the_source_does_not_have_is_found() -> None:
    """The check itself: what a recipe would be without the trainer's own defaults fails it."""
    left_out = ["task.cond_drop_prob=0.05", "train.max_grad_norm=1.0", "optimizer.decay=matrices", "ema.decay=0.9999"]
    cfg = checked("experiment=sd_finetune", *NEEDED["experiment=sd_finetune"], *left_out)
    assert differences(cfg, rows_of("open_diffusion", "sd_finetune")).keys() == {
        "task.cond_drop_prob", "train.max_grad_norm", "optimizer.decay", "ema.decay", "run.seed",
    }  # fmt: skip
