"""The table of tiers on docs/memory.md: every model and task that fit, and a part of it computed anew."""

from __future__ import annotations

import pytest

from cascade_train.config.groups import option_targets
from cascade_train.config.targets import class_constant
from scripts import write_memory_tiers

LINES = (
    write_memory_tiers.PAGE.read_text().split(write_memory_tiers.FIRST)[1].split(write_memory_tiers.LAST)[0].split("\n")
)
ROWS = [line.split("|")[1:3] for line in LINES[3:-1]]


def test_every_published_stage_of_the_cascade_has_a_row_for_every_task_that_trains_it():
    tasks = {task: class_constant(target, "fits") for task, target in option_targets("task").items()}
    models = {m: class_constant(t, "name") for m, t in option_targets("model").items() if not m.endswith("_tiny")}
    stages = {model: stage for model, stage in models.items() if stage.startswith("stage_")}
    pairs = {(model, task) for model, stage in stages.items() for task, fits in tasks.items() if stage in fits}
    previews = {(model, "reconstruction") for model, stage in stages.items() if stage == "stage_c"}
    listed = {tuple(cell.strip(" `") for cell in row) for row in ROWS}
    others = {(model, task) for model in ("sd15", "sd21_base", "sdxl") for task in ("lora", "finetune")}
    assert listed == set(write_memory_tiers.RUNS) == (pairs - previews) | others


@pytest.mark.parametrize(("model", "task"), [("c_1b", "lora"), ("a", "reconstruction")])
def test_the_table_is_fresh(model: str, task: str):
    assert write_memory_tiers.row(model, task) in LINES, "run: python scripts/write_memory_tiers.py"
