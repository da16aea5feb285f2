"""Write the table of docs/memory.md that says what each tier of `memory=` chooses for each model and task.

    python scripts/write_memory_tiers.py

Computed by rehearsed steps, for one GPU and a global batch of 32; takes minutes. A test computes a part of it anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from cascade_train.assembly.planning.devices import Room
from cascade_train.assembly.planning.fitting import TIERS_GB, Place, changed, choose
from cascade_train.assembly.planning.memory import Memory
from cascade_train.assembly.planning.rehearsal import Rehearsed
from cascade_train.config.groups import conf_dir
from cascade_train.config.hydra_compat import BASE
from cascade_train.config.launch import register_schema
from cascade_train.config.preflight import preflight
from cascade_train.errors import ConfigError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
FIRST, LAST = "<!-- tiers: computed -->", "<!-- end -->"
RUNS = (
    *((model, task) for model in ("c_1b", "c_3b") for task in ("lora", "controlnet", "finetune")),
    ("a", "reconstruction"),
    *((model, task) for model in ("b_700m", "b_3b") for task in ("lora", "reconstruction")),
    *((model, task) for model in ("sd15", "sd21_base", "sdxl") for task in ("lora", "finetune")),
)
SHORT = {
    "ema.device": "average on the host",
    "activation_checkpointing": "checkpointing",
    "optimizer.algorithm": "8-bit AdamW",
    "train.master_weights": "bf16 weights",
    "train.base_weights": "8-bit base",
    "parallel.cpu_offload": "offload",
}
"""Means, as the table has them."""


def row(model: str, task: str) -> str:
    """Return the line of a model and task."""
    register_schema()
    with initialize_config_dir(str(conf_dir()), **BASE):
        cfg = preflight(compose("config", [f"model={model}", f"task={task}", "run.name=tier"]), ranks=1)
    known: dict[str, tuple[Memory, Rehearsed]] = {}
    return f"| `{model}` | `{task}` | {' | '.join(cell(cfg, gb, known) for gb in TIERS_GB)} |"


def cell(cfg: DictConfig, gb: int, known: dict[str, tuple[Memory, Rehearsed]]) -> str:
    """Return what a tier chooses: means, micro-batch and computed peak in GB; `known`: what was rehearsed."""
    place = Place(room=Room(gb=float(gb), on_cuda=True), ranks=1, machine_ranks=1, known=known)
    try:
        choice = choose(changed(cfg, {"memory.budget_gb": float(gb)}), place)
    except ConfigError:
        return "-"
    means = ", ".join(SHORT[key] for key in choice.values)
    return f"{means}{'; ' if means else ''}{choice.micro_batch_size} at a time, {choice.bytes / 1e9:.1f}"


def lines() -> Iterator[str]:
    """Yield the table."""
    yield f"| `model` | `task` | {' | '.join(f'`memory={gb}gb`' for gb in TIERS_GB)} |"
    yield f"|---|---|{'---|' * len(TIERS_GB)}"
    yield from (row(model, task) for model, task in RUNS)


if __name__ == "__main__":
    new = "\n".join([FIRST, *lines(), LAST])
    text, count = re.subn(f"{FIRST}.*?{LAST}", lambda _: new, PAGE.read_text(), flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{PAGE} needs one part between {FIRST} and {LAST}")
    PAGE.write_text(text)
