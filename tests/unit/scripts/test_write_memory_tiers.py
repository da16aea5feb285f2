"""The tables of memory: what has a row, a part computed anew, and what texts repeat of them."""

from __future__ import annotations

import math

import pytest

from cascade_train.config.groups import option_targets
from cascade_train.config.targets import class_constant
from scripts import write_memory_tiers

pytestmark = pytest.mark.slow

PAGE = write_memory_tiers.PAGE.read_text()
LINES = PAGE.split(write_memory_tiers.FIRST)[1].split(write_memory_tiers.LAST)[0].split("\n")
ROWS = [line.split("|")[1:3] for line in LINES[3:-1]]


def test_every_published_stage_of_the_cascade_has_a_row_for_every_task_that_trains_it():
    tasks = {task: class_constant(target, "fits") for task, target in option_targets("task").items()}
    models = {m: class_constant(t, "name") for m, t in option_targets("model").items() if not m.endswith("_tiny")}
    stages = {model: stage for model, stage in models.items() if stage.startswith("stage_")}
    can = {m: class_constant(t, "abilities") for m, t in option_targets("model").items()}
    pairs = {(model, task) for model in stages for task, fits in tasks.items() if can[model] & {*fits}}
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


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        each if each[1] == "model=c_1b task=lora" else pytest.param(*each, marks=pytest.mark.recipes)
        for each in write_memory_tiers.OVERVIEW
    ],
)
def test_the_tables_of_the_readme_and_of_scale_are_fresh(name: str, overrides: str):
    for page, line in (
        (write_memory_tiers.README, write_memory_tiers.overview(name, overrides)),
        (write_memory_tiers.SCALE, write_memory_tiers.split(name, overrides)),
    ):
        assert line in page.read_text().split("\n"), "run: python scripts/write_memory_tiers.py"


def rows(page: str) -> list[list[str]]:
    """Return the cells of the tables of a page, without their marks."""
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.split("\n") if line[:2] == "| "]


def test_numbers_of_memory_in_texts_are_those_of_the_tables():
    readme, memory, scale, trouble, lora = (
        (write_memory_tiers.README.parent / name).read_text()
        for name in ("README.md", "docs/memory.md", "docs/scale.md", "docs/troubleshooting.md", "docs/first-lora.md")
    )
    split = {name.replace("`", ""): numbers for name, *numbers in rows(scale)}
    least = {overrides: numbers for _, overrides, *numbers in rows(memory.split(write_memory_tiers.FIRST_LEAST)[1])}
    adafactor = "task=finetune train.master_weights=bf16 optimizer=adafactor"
    whole, adapters = (f"{float(split[name][0]):.0f}" for name in ("c_3b, all weights", "c_3b, LoRA"))
    one, two, four, eight = split["c_3b, all weights"]
    offloaded = f"{float(least['model=c_3b task=finetune parallel.cpu_offload=true'][2]):.0f}"
    repeated = (
        (readme, f"{least['model=c_3b task=lora train.base_weights=int8'][0]} GB for a LoRA of `c_3b` on int8"),
        (readme, f"bf16 weights, {least[f'model=c_3b {adafactor}'][0]} GB (`c_3b`)"),
        (readme, f"(`c_3b`) and\n{least[f'model=c_1b {adafactor}'][0]} GB (`c_1b`)"),
        (lora, f"a LoRA on the 3.6B takes {split['c_3b, LoRA'][0]} GB"),
        (lora, f"on the 1B {split['c_1b, LoRA'][0]} GB"),
        (scale, f"takes {one} GB, with an average of the weights on the device 82:"),
        (scale, f"bf16 weights ({least[f'model=c_3b {adafactor}'][0]} GB)"),
        (scale, f"{two} or {four} GB at one image"),
        (scale, f"`hsdp` for finetuning ({eight} GB"),
        (scale, f"pinned memory ({offloaded} GB"),
        (trouble, f"Fine-tuning all of `c_3b` takes {whole} GB with checkpointing"),
        (trouble, f"; a LoRA takes {adapters} GB"),
        (trouble, f"training takes {split['c_3b, ControlNet'][0]} GB with"),
        (memory, f"the README has {split['c_3b, ControlNet'][0]} GB for the ControlNet"),
    )
    assert [text for page, text in repeated if text not in page] == []
