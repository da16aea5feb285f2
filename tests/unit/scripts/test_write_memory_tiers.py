"""The tables of docs/memory.md: every model and task that fit, what needs little, and a part computed anew."""

from __future__ import annotations

import math

import pytest

from cascade_train.config.groups import option_targets
from cascade_train.config.targets import class_constant
from scripts import write_memory_tiers

PAGE = write_memory_tiers.PAGE.read_text()
LINES = PAGE.split(write_memory_tiers.FIRST)[1].split(write_memory_tiers.LAST)[0].split("\n")
ROWS = [line.split("|")[1:3] for line in LINES[3:-1]]


def test_every_published_stage_of_the_cascade_has_a_row_for_every_task_that_trains_it():
    tasks = {task: class_constant(target, "fits") for task, target in option_targets("task").items()}
    models = {m: class_constant(t, "name") for m, t in option_targets("model").items() if not m.endswith("_tiny")}
    stages = {model: stage for model, stage in models.items() if stage.startswith("stage_")}
    pairs = {(model, task) for model, stage in stages.items() for task, fits in tasks.items() if stage in fits}
    previews = {(model, "reconstruction") for model, stage in stages.items() if stage == "stage_c"}
    listed = {tuple(cell.strip(" `") for cell in row) for row in ROWS}
    others = {(model, task) for model in ("sd15", "sd21_base", "sdxl") for task in ("lora", "controlnet", "finetune")}
    assert listed == set(write_memory_tiers.RUNS) == (pairs - previews) | others


@pytest.mark.parametrize(("model", "task"), [("c_1b", "lora"), ("a", "reconstruction")])
def test_the_table_is_fresh(model: str, task: str):
    assert write_memory_tiers.row(model, task) in LINES, "run: python scripts/write_memory_tiers.py"


ASKED = {
    "model=c_3b task=lora": 10e9,
    "model=c_3b task=controlnet": 12e9,
    "model=c_3b task=finetune parallel.cpu_offload=true": 18e9,
    "model=c_1b task=finetune parallel.cpu_offload=true": 7.5e9,
}
"""Bytes that a training of one picture at a time may need where its latents and texts come from a cache."""


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        each if "c_1b" in each[1] else pytest.param(*each, marks=pytest.mark.recipes)
        for each in write_memory_tiers.LEAST
    ],
)
def test_what_needs_little_is_computed_as_the_page_says(name: str, overrides: str):
    assert write_memory_tiers.least(name, overrides) in PAGE.split("\n"), "run: python scripts/write_memory_tiers.py"
    cached = float(write_memory_tiers.least(name, overrides).split("|")[4]) * 1e9
    assert cached <= ASKED.get(overrides, math.inf)
