"""The recipes of other trainers do what these trainers' code does, or name the difference and its reason.

The rows lie in tests/golden/original/systems.yaml and were read from the trainers' source; no importer is asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.unit.config.composing import checked
from tests.unit.config.defaults import canonical
from tests.unit.config.systems import SYSTEM_OF, SYSTEMS, differing, rows_of
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


def unlike(rows: Mapping[str, Any], found: Callable[[str], Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose value found is not that of the rows, with both: (found, row)."""
    pairs = {key: (found(key), value) for key, value in rows.items()}
    return {key: pair for key, pair in pairs.items() if canonical(key, pair[0]) != canonical(key, pair[1])}


def composed_values(*overrides: str, extra: Path | None = None) -> Callable[[str], Any]:
    """Return what looks keys up in a configuration, `extra` as for `checked`; a key that is not there is `absent`."""
    cfg = checked(*overrides, extra=extra)
    OmegaConf.resolve(cfg)

    def found(key: str) -> Any:
        value = OmegaConf.select(cfg, key, default="absent")
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    return found


@pytest.mark.parametrize(("recipe", "system"), SYSTEM_OF.items())
def test_a_recipe_does_what_its_trainers_code_does(recipe: str, system: str) -> None:
    choice = f"experiment={recipe}"
    different = unlike(rows_of(system, recipe), composed_values(choice, *NEEDED[choice]))
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
    found = composed_values("experiment=sd_finetune", *NEEDED["experiment=sd_finetune"], *left_out)
    assert unlike(rows_of("open_diffusion", "sd_finetune"), found).keys() == {
        "task.cond_drop_prob", "train.max_grad_norm", "optimizer.decay", "ema.decay", "run.seed",
    }  # fmt: skip
