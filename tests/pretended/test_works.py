"""What a run does beside its steps waits for the device no more than it must: a bound for each, in its own units."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HELD_OUT, MADE, STEPS, BATCH = 8, 16, 4, 8
RUN = (
    *("data=shapes", "data.num_workers=0", "train.global_batch_size=2", "train.max_steps=1", "sample.every_steps=1"),
    *("validate.every_steps=1", "validate.share=0.1", f"validate.samples={HELD_OUT}", "checkpoint.every_steps=1"),
    *("log.every_steps=null", "data.samples=160", f"sample.steps={STEPS}", "sample.count=2"),
)
RUNS = {
    "sd": ("task=lora", "model=sd_tiny"),
    "b": ("task=reconstruction", "model=b_tiny"),
    "c": ("task=finetune", "model=c_tiny", "ema.decay=0.9"),
}
"""The last makes mistakes, too."""
VERBS = {
    "generate": ["generate", "from={run}", "prompts=[a red circle,a blue square]", f"steps={STEPS}", "out={out}"],
    "evaluate": ["evaluate", "from={run}", f"samples={MADE}", f"steps={STEPS}", "out={out}"],
    "cache": ["cache", "out={out}", "task=finetune", "model=c_tiny", "data=shapes", "data.num_workers=0"],
}
VERBS["cache"] += [f"data.samples={MADE}", f"batch_size={BATCH}"]
VERBS_OF = {
    "c": {**VERBS, "evaluate": [*VERBS["evaluate"], "features=package:tiny"]},
    "b": {"evaluate": VERBS["evaluate"]},
    "sd": {},
}
LOADING = ("models/formats/weights.py", "models/initialize.py", "engine/checkpoint/loading.py")
"""Where weights come to the device, tensor by tensor, before the work begins."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("works")
    works = {name: {"run": [*RUN, *run], "verbs": VERBS_OF[name], "planted": name == "c"} for name, run in RUNS.items()}
    (folder / "works.json").write_text(json.dumps(works))
    program = [sys.executable, "-m", "tests.pretended.works", str(folder)]
    done = subprocess.run(program, cwd=repository, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    noted: dict[str, Any] = json.loads((folder / "noted.json").read_text())
    return noted


def costs(noted: list[list[Any]]) -> Counter[str]:
    """Return how often the host waits, by kind; loading weights and planted mistakes aside."""
    found: Counter[str] = Counter()
    for kind, _, where, count in noted:
        if kind not in ("to_device", "to_host") and not where.startswith((*LOADING, "works.py:")):
            found[f"{kind} {where.partition(':')[0]}"] += count
    return found


def batches(pictures: int) -> int:
    return -(-pictures // BATCH)


GRID = {"wait engine/loss_charts.py": 1}  # the loss by noise level, once a drawing
SAVE = {"wait engine/loop.py": 1}  # what is logged before, of which the flag of withheld updates
PIXELS, TENSORS, FEATURES = (
    f"to_host_blocking {file}" for file in ("engine/sampling.py", "engine/phase.py", "results/evaluation/measures.py")
)
KEPT = "to_host_blocking assembly/cache_making.py"
REAL = 17  # pictures that validate.share holds out
BOUNDS = {
    "c": {
        "validate": {},
        "sample": {**GRID, PIXELS: 4},  # originals, reconstructions, samples, samples of the average
        "save": SAVE,
        "export": {TENSORS: 206},
        "generate": {PIXELS: 1},
        "evaluate": {PIXELS: batches(MADE), FEATURES: batches(MADE) + batches(REAL)},
        "cache": {KEPT: 11},
    },
    "b": {
        "validate": {},
        "sample": {**GRID, PIXELS: 3},
        "save": SAVE,
        "export": {TENSORS: 124},
        "evaluate": {PIXELS: batches(MADE), FEATURES: batches(MADE)},
    },
    "sd": {"validate": {}, "sample": {**GRID, PIXELS: 3}, "save": SAVE, "export": {TENSORS: 64}},
}
"""How often the host waits in each, by kind and file."""

SAVED = {"c": 5, "b": 4, "sd": 4}
"""Tensors of a checkpoint for each weight that trains: itself, two moments, a count of steps; in c its average, too."""


@pytest.mark.parametrize("name", RUNS)
def test_the_host_waits_once_for_each_result_that_it_writes(found: dict[str, Any], name: str) -> None:
    """And no batch, no step of sampling and no saved tensor makes it wait."""
    works = found[name]["works"]
    assert {work: dict(costs(noted)) for work, noted in works.items()} == BOUNDS[name]
    copies = sum(count for kind, _, _, count in works["save"] if kind == "to_host")
    assert copies == SAVED[name] * BOUNDS[name]["export"][TENSORS]


@pytest.mark.parametrize("name", RUNS)
def test_losses_pictures_and_weights_are_those_of_the_host(found: dict[str, Any], name: str) -> None:
    """To the bit: validation, samples of the weights and of their average, and the export."""
    assert found[name]["unequal"] == []
    assert found[name]["compared"] > 5


def test_a_wait_for_each_unit_is_found(found: dict[str, Any]) -> None:
    planted = {
        work: sum(count for kind, _, where, count in noted if kind == "wait" and where.startswith("works.py:"))
        for work, noted in found["c"]["works"].items()
    }
    drawn = STEPS + 1  # noises of a picture
    assert planted == {
        "validate": HELD_OUT // 2 * 2,  # batches of two, with the weights and with their average
        "sample": 2 * drawn + 1,  # likewise, and what the previewer reconstructs
        "save": 0,
        "export": 0,
        "generate": drawn,
        "evaluate": batches(MADE) * drawn + batches(MADE) + batches(REAL),
        "cache": BOUNDS["c"]["cache"][KEPT],
    }
