"""How often the host would wait for a GPU in a step, over all that trains, on the pretended device of tests/pretended.

    python bench/waits.py --out bench/results/waits.md

Every combination of what trains with the forms below trains three steps on the host and on the device; the page has how
often the last one waits, mixes tensors of both, and copies, and whether the losses are equal to the bit. Then what each
does beside its steps: how often the host waits in a validation, a grid of samples, a checkpoint and an export.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` and `tests` are packages of this checkout

from bench.soak import commit
from tests.pretended.test_waits import ACCUMULATED, BASE, OPTIMIZERS, RUNS
from tests.pretended.test_works import RUN, costs

ROOT = Path(__file__).resolve().parents[1]
FORMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "precision": {"fp32": ("train.precision=fp32",), "bf16": ("train.precision=bf16",)},
    "EMA": {"no": ("ema.decay=null",), "yes": ("ema.decay=0.9",)},
    "batch": {"whole": (), "accumulated": ACCUMULATED},
    "activations": {"kept": (), "recomputed": ("activation_checkpointing=true",)},
}
OBJECTIVES = ("gdf", "adaptive", "min_snr", "debiased", "rectified_flow", "edm")


def combinations() -> dict[str, tuple[str, ...]]:
    """Return the overrides of every run, by its name."""
    runs = {}
    for (name, run), *forms in itertools.product(RUNS.items(), *(form.items() for form in FORMS.values())):
        if name == "previewer" and "recomputed" in [each[0] for each in forms]:
            continue  # it is refused: there is nothing to recompute
        own = tuple(each for each in run if not each.startswith(("ema.", "train.")))
        runs[", ".join([name, *(f"{key} {each[0]}" for key, each in zip(FORMS, forms, strict=True))])] = (
            *own,
            *(override for _, overrides in forms for override in overrides),
        )
    for name, optimizer in itertools.product(("c lora", "sd lora", "c"), OPTIMIZERS):
        runs[f"{name}, optimizer {optimizer}"] = (*RUNS[name], "ema.decay=null", f"optimizer={optimizer}")
    for name, objective in itertools.product(("c lora", "b lora"), OBJECTIVES):
        runs[f"{name}, objective {objective}"] = (*RUNS[name], f"objective={objective}")
    return {name: tuple(dict.fromkeys(overrides)) for name, overrides in runs.items()}


def line(name: str, found: Mapping[str, Any]) -> tuple[str, bool]:
    """Return a run's line of the table, and whether it neither waits nor mixes and trains as on the host."""
    kinds = Counter(kind for kind, _, _ in found["noted"])
    waits = kinds["wait"] + kinds["to_host_blocking"] + kinds["to_device_blocking"]
    is_equal = found["host"] == found["device"]
    places = sorted({where for kind, _, where in found["noted"] if kind != "to_device"})
    cells = (waits, kinds["mix"], kinds["to_device"], "equal" if is_equal else "DIFFERS", "; ".join(places))
    return f"| {name} | {' | '.join(map(str, cells))} |", waits + kinds["mix"] == 0 and is_equal


def beside_steps(only: str) -> list[str]:
    """Return the table of what runs do beside their steps."""
    runs = {name: run for name, run in RUNS.items() if only in name and "model.weights=null" not in run}
    works = {name: {"run": [*RUN, *run], "verbs": {}, "planted": False} for name, run in runs.items()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "works.json").write_text(json.dumps(works))
        subprocess.run([sys.executable, "-m", "tests.pretended.works", folder], cwd=ROOT, check=True)
        found = json.loads((Path(folder) / "noted.json").read_text())
    columns = ("validate", "sample", "save", "export")
    table = [f"| run | {' | '.join(columns)} | as on the host |", "|---|---|---|---|---|---|"]
    for name, each in found.items():
        cells = [
            "; ".join(f"{n} {what}" for what, n in costs(each["works"].get(c, [])).items()) or "0" for c in columns
        ]
        equal = f"{each['compared']} files" if not each["unequal"] else f"DIFFERS: {', '.join(each['unequal'])}"
        table.append(f"| {name} | {' | '.join(cells)} | {equal} |")
    return table


def main() -> None:
    """Run all, print what is not free of waits, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="runs whose name holds this")
    args = parser.parse_args()
    runs = {name: run for name, run in combinations().items() if args.only in name}
    with tempfile.TemporaryDirectory() as folder:
        plain = {name: {"overrides": [*BASE, *run], "planted": False} for name, run in runs.items()}
        (Path(folder) / "runs.json").write_text(json.dumps(plain))
        subprocess.run([sys.executable, str(ROOT / "tests/pretended/runs.py"), folder], cwd=ROOT, check=True)
        found = json.loads((Path(folder) / "found.json").read_text())
    lines = {name: line(name, each) for name, each in found.items()}
    free = sum(is_free for _, is_free in lines.values())
    head = ["| run | waits | mixes | copies to the device | losses | where |", "|---|---|---|---|---|---|"]
    rest = [text for text, is_free in lines.values() if not is_free]
    alike = Counter(each["noted"].__len__() for each in found.values())
    page = [
        "# How often a step waits for the device",
        f"    python bench/waits.py --out {args.out}",
        f"Commit {commit()}, {datetime.now(UTC):%Y-%m-%d}. {len(lines)} runs: {free} neither wait nor mix, and train"
        " as on the host, to the bit. The others first: Prodigy's waits are three lines of pytorch_optimizer"
        " (`tests/pretended/test_waits.py` names them).",
        "\n".join([*head, *rest]),
        "\n".join([*head, *(text for text, is_free in lines.values() if is_free)]),
        f"Copies of a step by number of runs: {dict(sorted(alike.items()))}.",
        "## Beside the steps",
        "How often the host waits in one validation, grid, checkpoint and export, by kind and place; a grid once a"
        " column and for its chart, an export once a tensor.",
        "\n".join(beside_steps(args.only)),
    ]
    args.out.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    print("\n".join([page[2], *rest]))


if __name__ == "__main__":
    main()
