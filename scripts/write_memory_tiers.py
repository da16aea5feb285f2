"""Write the tables of memory in docs/memory.md and docs/scale.md.

    python scripts/write_memory_tiers.py

Computed by traced steps, the tiers for one GPU and a global batch of 32; takes minutes. A test computes a part of it
anew.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig

from cascade_train.assembly.planning.devices import Budget
from cascade_train.assembly.planning.memory import changed, memory_of, over_ranks
from cascade_train.assembly.planning.memory_trace import ENCODERS
from cascade_train.assembly.planning.strategies import MICRO, choose
from cascade_train.config.launch import compose_root
from cascade_train.config.preflight import preflight

TIERS_GB = (16, 24, 48, 80)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
SCALE = PAGE.with_name("scale.md")
FIRST, LAST = "<!-- tiers: computed -->", "<!-- end -->"
FIRST_LEAST = "<!-- least: computed -->"
LEAST = (
    ("`c_3b`, LoRA", "model=c_3b task=lora"),
    ("the same, with the frozen network in int8", "model=c_3b task=lora train.base_weights=int8"),
    ("`c_1b`, LoRA", "model=c_1b task=lora"),
    ("`c_3b`, ControlNet", "model=c_3b task=controlnet"),
    ("the same, with the frozen network in int8", "model=c_3b task=controlnet train.base_weights=int8"),
    ("`c_3b`, all weights, weights in bf16", "model=c_3b task=finetune train.master_weights=bf16 optimizer=adamw_8bit"),
    ("the same by Adafactor", "model=c_3b task=finetune train.master_weights=bf16 optimizer=adafactor"),
    ("`c_3b`, all weights, offloaded", "model=c_3b task=finetune parallel.cpu_offload=true"),
    ("`c_1b`, all weights, weights in bf16", "model=c_1b task=finetune train.master_weights=bf16 optimizer=adamw_8bit"),
    ("the same by Adafactor", "model=c_1b task=finetune train.master_weights=bf16 optimizer=adafactor"),
    ("`c_1b`, all weights, offloaded", "model=c_1b task=finetune parallel.cpu_offload=true"),
)
"""Trainings that need little, and their overrides."""

FIRST_SPLIT = "<!-- split: computed -->"
SPLIT = (
    ("`c_3b`, LoRA", "model=c_3b task=lora"),
    ("`c_1b`, LoRA", "model=c_1b task=lora"),
    ("`c_3b`, ControlNet", "model=c_3b task=controlnet"),
    ("`c_3b`, all weights", "model=c_3b task=finetune"),
    ("`c_1b`, all weights", "model=c_1b task=finetune"),
    ("`b_3b`, all weights", "model=b_3b task=reconstruction"),
    ("`sdxl`, LoRA", "model=sdxl task=lora"),
    ("`sdxl`, all weights", "model=sdxl task=finetune"),
)
"""Trainings of docs/scale.md, and their overrides."""

ALWAYS = ("train.global_batch_size=1", "activation_checkpointing=true")
RUNS = (
    *((model, task) for model in ("c_1b", "c_3b") for task in ("lora", "controlnet", "finetune")),
    *(("b_3b", task) for task in ("lora", "reconstruction")),
    *(("sdxl", task) for task in ("lora", "controlnet", "finetune")),
)
SHORT = {
    "ema.device": "average on the host",
    "activation_checkpointing": "checkpointing",
    "optimizer.algorithm": "8-bit AdamW",
    "train.master_weights": "bf16 weights",
    "train.base_weights": "8-bit base",
    "parallel.cpu_offload": "offload",
}
"""Savings, as the table has them."""


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the checked configuration of a run of one rank."""
    return preflight(compose_root([*overrides, "run.name=tier"], for_run=False), ranks=1)


def needs(overrides: str) -> tuple[int, int, int]:
    """Return bytes of a training of one picture at a time: of the device, of it without encoders, and of the host."""
    cfg = composed([*overrides.split(), *ALWAYS])
    whole, _ = memory_of(cfg)
    memory = over_ranks(cfg, whole, 1, machine_ranks=1, device_gb=math.inf)
    cached = dataclasses.replace(memory, on_host=memory.on_host | {ENCODERS})
    return memory.total(1), cached.total(1), memory.host_bytes()


def least(name: str, overrides: str) -> str:
    """Return the line of a training that needs little."""
    return f"| {name} | `{overrides}` | {' | '.join(f'{each / 1e9:.1f}' for each in needs(overrides))} |"


def split(name: str, overrides: str) -> str:
    """Line of a training in docs/scale.md: GB of each of 1, 2, 4 and 8 GPUs, one picture at a time, accumulated."""
    cfg = composed([*overrides.split(), *ALWAYS])
    whole, _ = memory_of(cfg)
    sharded = changed(cfg, {"parallel.mode": "fsdp"})
    memory = [over_ranks(sharded, whole, n, machine_ranks=n, device_gb=math.inf) for n in (1, 2, 4, 8)]
    return f"| {name} | {' | '.join(f'{each.total(1, 2) / 1e9:.1f}' for each in memory)} |"


def row(model: str, task: str) -> str:
    """Return the line of a model and task."""
    cfg = composed([f"model={model}", f"task={task}"])
    return f"| `{model}` | `{task}` | {' | '.join(cell(cfg, gb) for gb in TIERS_GB)} |"


def cell(cfg: DictConfig, gb: int) -> str:
    """Return what a tier chooses: savings, micro-batch and computed peak in GB."""
    choice = choose(changed(cfg, {"memory.budget_gb": float(gb)}), Budget(gb=float(gb)))
    if not choice.fits:
        return "-"
    savings = ", ".join(SHORT[key] for key in choice.values if key != MICRO)
    return f"{savings}{'; ' if savings else ''}{choice.values[MICRO]} at a time, {choice.bytes / 1e9:.1f}"


def lines() -> Iterator[str]:
    """Yield the table."""
    yield f"| `model` | `task` | {' | '.join(f'`memory={gb}gb`' for gb in TIERS_GB)} |"
    yield f"|---|---|{'---|' * len(TIERS_GB)}"
    yield from (row(model, task) for model, task in RUNS)


def least_lines() -> Iterator[str]:
    """Yield the table of trainings that need little."""
    yield "| training | overrides | device | without encoders | host |"
    yield "|---|---|---|---|---|"
    yield from (least(*each) for each in LEAST)


def split_lines() -> Iterator[str]:
    """Yield the table of docs/scale.md."""
    yield "| | whole (single, ddp) | split over 2 | over 4 | over 8 |"
    yield "|---|---|---|---|---|"
    yield from (split(*each) for each in SPLIT)


def renewed(text: str, first: str, new: Iterable[str]) -> str:
    """Return a page with other lines between a mark and the next end."""
    made = "\n".join([first, *new, LAST])
    text, count = re.subn(f"{first}.*?{LAST}", lambda _: made, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"a page needs one part between {first} and {LAST}, and has {count}")
    return text


if __name__ == "__main__":
    PAGE.write_text(renewed(renewed(PAGE.read_text(), FIRST, lines()), FIRST_LEAST, least_lines()))
    SCALE.write_text(renewed(SCALE.read_text(), FIRST_SPLIT, split_lines()))
