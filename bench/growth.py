"""How time and memory grow with everything that may become large, each with the exponent that fits.

    python bench/growth.py --out bench/results/growth.md

Each point is a process of its own. Its seconds are of CPU, user and system, its MiB the memory that it holds for itself
alone, above its imports where they are of an index. A curve is fitted by floor + b n^e: the floor is what remains where
n is 1, e how it grows, 0 = not at all. Trainings are of `task=finetune model=c_tiny`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

from bench import index
from bench.soak import commit

TRAINING = """
import json, resource, sys
from pathlib import Path
from cascade_train.__main__ import launch

assert launch(sys.argv[1:]) == 0
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({"cpu": sum(each.ru_utime + each.ru_stime for each in used), "private": used[0].ru_maxrss / 1024}))
"""
COMMON = (
    "task=finetune", "model=c_tiny", "train.global_batch_size=2", "log.every_steps=1",
    "train.precision=fp32", "sample.every_steps=null", "validate.share=null", "data.samples=256",
)  # fmt: skip
ROUNDS = 3

Point = dict[str, float]
"""CPU seconds, `cpu`, and MiB, `private`."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Something that grows."""

    what: str  # is measured
    numbers: Sequence[int]
    measure: Callable[[Path, int], Point]
    floor: str  # what cannot be less


def train(*arguments: str) -> Point:
    """Run a training in a process and return its costs."""
    command = [sys.executable, "-c", TRAINING, *COMMON, *arguments]
    command += [] if any("num_workers" in each for each in arguments) else ["data.num_workers=0"]
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: Point = json.loads(done.stdout.splitlines()[-1])
    return found


def resumed(folder: Path, steps: int) -> Point:
    """Resume a run after many steps, for one more."""
    run = folder / f"run-{steps}"
    options = (f"run.dir={run}", f"train.max_steps={steps}", "checkpoint.every_steps=1000000", "run.resume=auto")
    if not run.exists():
        train(*options)
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    return train(*options, f"run.dir={copy}", f"train.max_steps={steps + 1}")


def kept(folder: Path, checkpoints: int) -> Point:
    """Save a checkpoint beside many that are kept."""
    run = folder / f"kept-{checkpoints}"
    options = ("checkpoint.every_steps=1", f"checkpoint.keep_last={checkpoints}")
    if not run.exists():
        train(*options, f"run.dir={run}", f"train.max_steps={checkpoints}")
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    return train(*options, f"run.dir={copy}", f"train.max_steps={checkpoints + 1}")


def prompts(folder: Path, count: int) -> Point:
    """Sample a grid of many prompts after one step."""
    texts = ",".join(f"a red circle {number}" for number in range(count))
    shutil.rmtree(folder / "prompts", ignore_errors=True)
    options = ("sample.every_steps=1", f"sample.prompts=[{texts}]", "train.max_steps=1")
    return train(*options, f"run.dir={folder / 'prompts'}")


def workers(folder: Path, count: int) -> Point:
    """Take ten steps with many workers."""
    shutil.rmtree(folder / "workers", ignore_errors=True)
    return train(f"data.num_workers={count}", "train.max_steps=10", f"run.dir={folder / 'workers'}")


def indexed(tars: int, samples: int, ranks: int = 1, **options: object) -> Callable[[Path], Point]:
    """Return what measures a warm start of so many tars."""

    def measure(folder: Path) -> Point:
        data = folder / f"{tars}-{samples}"
        if not data.exists():
            data.mkdir()
            index.make(data, tars, samples)
            index.measure(data, tars, "mapped")
        if options:
            index.measure(data, tars, "mapped", **options)  # type: ignore[arg-type]
        return index.measure(data, tars, "mapped", ranks, **options)  # type: ignore[arg-type]

    return measure


IMPORTS = "imports, and the libraries' own work"
AXES = {
    "samples": Axis(
        what="a start with the index of 100 tars, to the first step",
        numbers=(10**4, 10**5, 10**6, 10**7),
        measure=lambda folder, n: indexed(100, n // 100)(folder),
        floor="one stat and one hash a tar",
    ),
    "tars": Axis(
        what="a start with the index of 10^5 samples, to the first step",
        numbers=(100, 1_000, 10_000),
        measure=lambda folder, n: indexed(n, 10**5 // n)(folder),
        floor="one stat and one hash a tar: e = 1",
    ),
    "buckets": Axis(
        what="a start with 10^6 samples, to the first step",
        numbers=(1, 4, 16, 64),
        measure=lambda folder, n: indexed(100, 10**4, ratios=n)(folder),
        floor="a permutation of one window",
    ),
    "ranks": Axis(
        what="the slowest of so many ranks of one machine, 10^6 samples",
        numbers=(1, 2, 4, 8),
        measure=lambda folder, n: indexed(100, 10**4, ranks=n)(folder),
        floor="that of one rank",
    ),
    "steps": Axis(
        what="a resume and one step after so many, each logged",
        numbers=(1, 10, 100, 1_000),
        measure=resumed,
        floor=f"{IMPORTS}; the lines of metrics.jsonl are read once: e = 1",
    ),
    "checkpoints": Axis(
        what="a resume, one step and a save beside so many checkpoints",
        numbers=(1, 4, 16, 64),
        measure=kept,
        floor=f"{IMPORTS}; a list of names",
    ),
    "prompts": Axis(
        what="one step and a grid of so many prompts",
        numbers=(1, 4, 16, 64),
        measure=prompts,
        floor=f"{IMPORTS}; the passes of each picture: e = 1",
    ),
    "workers": Axis(
        what="ten steps with so many workers (memory is of the main process)",
        numbers=(1, 2, 4, 8),
        measure=workers,
        floor=f"{IMPORTS}; one fork a worker: e = 1",
    ),
}


def fitted(numbers: Sequence[int], values: Sequence[float]) -> tuple[float, float, float]:
    """Return floor, b and e of floor + b n^e with the least squares of the relative errors, e of steps of 0.05."""
    n, y = np.array(numbers, dtype=float), np.array(values)
    best: tuple[float, tuple[float, float, float]] = (np.inf, (0.0, 0.0, 0.0))
    for e in np.arange(0.05, 2.01, 0.05):
        basis = np.stack([np.ones_like(n), n**e], axis=1) / y[:, None]
        (floor, b), *_ = np.linalg.lstsq(basis, np.ones_like(y), rcond=None)
        error = float(((basis @ [floor, b] - 1) ** 2).sum())
        if error < best[0]:
            best = error, (float(floor), float(b), float(e))
    return best[1]


def exponent(numbers: Sequence[int], values: Sequence[float]) -> str:
    """Return how the values grow, for the table: a tenth is noise."""
    floor, b, e = fitted(numbers, values)
    if values[-1] < 1.1 * values[0]:
        return "0"
    return f"{e:.2f} (from {floor:.2f}, {b * numbers[-1] ** e:+.2f} at {numbers[-1]:,})"


def chart(points: dict[str, dict[int, Point]]) -> Figure:
    """Return seconds and MiB over each axis."""
    figure = Figure(figsize=(10, 2.6 * len(points)), layout="constrained")
    rows = figure.subplots(len(points), 2, squeeze=False)
    for (left, right), (axis, found) in zip(rows, points.items(), strict=True):
        for axes, key, label in ((left, "cpu", "CPU s"), (right, "private", "MiB")):
            axes.plot(list(found), [each[key] for each in found.values()], "o-", color="#2040a0")
            axes.set(xscale="log", ylim=(0, None), xlabel=axis, ylabel=label)
    return figure


def main() -> None:
    """Measure each axis and write the page with its plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/growth.md"))
    parser.add_argument("--only", nargs="*", default=list(AXES), choices=list(AXES))
    args = parser.parse_args()
    points: dict[str, dict[int, Point]] = {}
    lines = ["| of | what | n: CPU s, MiB | e of seconds | e of MiB | floor |", "|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            axis = AXES[name]
            rounds = [{n: axis.measure(Path(folder), n) for n in axis.numbers} for _ in range(ROUNDS)]
            points[name] = {n: {key: float(np.median([each[n][key] for each in rounds])) for key in ("cpu", "private")}
                            for n in axis.numbers}  # fmt: skip
            values = {key: [each[key] for each in points[name].values()] for key in ("cpu", "private")}
            cells = "; ".join(f"{n:,}: {each['cpu']:.2f}, {each['private']:.0f}" for n, each in points[name].items())
            growth = " | ".join(exponent(axis.numbers, values[key]) for key in ("cpu", "private"))
            lines.append(f"| {name} | {axis.what} | {cells} | {growth} | {axis.floor} |")
            print(lines[-1], flush=True)
    head = f"Commit {commit()}, {datetime.now(UTC):%Y-%m-%d}. {os.cpu_count()} cores; medians of {ROUNDS} rounds."
    text = ["# How costs grow", f"    python bench/growth.py --out {args.out}", head, __doc__.split("\n\n")[2].strip()]
    args.out.write_text("\n\n".join([*text, "\n".join(lines), f"![curves]({args.out.stem}.png)"]) + "\n")
    chart(points).savefig(args.out.with_suffix(".png"), dpi=80)


if __name__ == "__main__":
    main()
