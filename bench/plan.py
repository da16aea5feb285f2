"""What `cascade-train plan` takes for each of the original's recipes and some of Stable Diffusion, as JSON and a page.

python bench/plan.py --out bench/results/plan.md

Each plan is a process of its own; before every third, another one only imports what a training needs, as
`bench/start.py` has it. Run it on an idle machine: a plan is to answer within ten seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

from bench.memory import RECIPES
from bench.soak import commit
from bench.start import NEEDS

PLANNED = (*RECIPES, "sd_finetune", "sdxl_finetune", "sdxl_lora")
NOT_IN_RECIPE = {"sd_finetune": ["data.num_examples_to_see=100000"]}
"""What a recipe leaves to its user and a plan needs."""
MOST_SECONDS = 10.0

Taken = tuple[float, float]
"""Seconds of wall time, and of the CPU as user."""


def arguments(recipe: str) -> list[str]:
    """Return the arguments of a recipe's plan."""
    return [f"experiment={recipe}", *NOT_IN_RECIPE.get(recipe, [])]


def taken(words: Sequence[str], folder: Path) -> Taken:
    """Return what one Python process takes."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{words[-1]} ended with {done.returncode}: {done.stderr.decode()}")
    return time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def measure(folder: Path, plans: dict[str, Taken], imports: list[Taken]) -> Iterator[str]:
    """Measure the recipes one after the other, and the imports before every third; yield the name of each that is done.

    The first process only fills caches.
    """
    taken(("-c", NEEDS), folder)
    for number, recipe in enumerate(PLANNED):
        if number % 3 == 0:
            imports.append(taken(("-c", NEEDS), folder))
        plans[recipe] = taken(("-m", "cascade_train", "plan", *arguments(recipe)), folder)
        yield recipe


def page(facts: dict[str, str], plans: dict[str, Taken], imports: Sequence[Taken]) -> str:
    """Return the page."""
    wall, cpu = (statistics.median(column) for column in zip(*imports, strict=True))
    rows = [f"| {name} | {own:.1f} | {user:.1f} | {user / cpu:.2f} |" for name, (own, user) in plans.items()]
    return "\n".join(
        [
            "# What a plan takes",
            "",
            f"    {facts['command']}",
            "",
            f"Commit {facts['commit']}, {facts['date']}. {facts['machine']}, load {facts['load']}.",
            "",
            "Seconds of `cascade-train plan experiment=…`, each in a process of its own, of the wall and of the CPU as",
            "user, and the latter beside importing what a training needs (`bench/start.py`), which ran in between.",
            "",
            "| recipe | wall | CPU | CPU / imports |",
            "|---|---|---|---|",
            *rows,
            f"| the imports alone, median | {wall:.1f} | {cpu:.1f} | |",
            "",
            f"At most {MOST_SECONDS:g} seconds are allowed, on an idle machine.",
            "",
        ]
    )


def main() -> int:
    """Measure, print JSON, write the page; 1 = a plan took too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    plans: dict[str, Taken] = {}
    imports: list[Taken] = []
    load = f"{os.getloadavg()[0]:.1f}"
    facts = {
        "command": " ".join(["python", "bench/plan.py", *sys.argv[1:]]),
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    with tempfile.TemporaryDirectory() as folder:
        for recipe in measure(Path(folder), plans, imports):  # what is cut short leaves what was measured by then
            print(recipe, plans[recipe], imports[-1], file=sys.stderr)
            facts["load"] = f"{load} before, {os.getloadavg()[0]:.1f} after"
            if arguments.out:
                arguments.out.write_text(page(facts, plans, imports), encoding="utf-8")
    print(json.dumps({**facts, "plans": plans, "imports": imports}, indent=1))
    return int(any(wall > MOST_SECONDS for wall, _ in plans.values()))


if __name__ == "__main__":
    sys.exit(main())
