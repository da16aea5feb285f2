"""What methods are worth on the tiny cascade: each beside its baseline, at equal samples and at equal seconds of CPU.

    python bench/laboratory.py --worker 0/2 & python bench/laboratory.py --worker 1/2; wait
    python bench/laboratory.py --pace    # alone on the machine; then the workers again, for equal seconds
    python bench/laboratory.py --again --rows "rank 16" "all weights"    # conclusions, with seeds of their own
    python bench/laboratory.py --page bench/results/laboratory.md

A LoRA teaches the packaged tiny Stage C a placement that it never saw, in some seconds (`laboratory_rows.BASELINE`).
`cascade_train.train` trains each arm, `cascade_train.evaluate` paints with it, and `shapes_judge` reads off its
previews whether the new placement was `learned` and the nine others were `kept`. Arms go to a file of one line each,
and what is there is not done again. A method's seeds are the baseline's, so that differences are paired; an interval of
95 % is Student's t over the seeds (eight resampled seeds give too narrow a bootstrap: 89 of 100 intervals of the
baseline against itself covered zero). The baseline with other seeds, against itself, says how far such intervals can be
trusted. A method whose step takes another time (in turns with the baseline's, in one process) trains
again with as many steps as the baseline's seconds allow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.laboratory_rows import BASELINE, KNOWN, NEW, ROWS, STEPS, Row
from bench.shapes_judge import accuracies
from bench.soak import commit
from bench.tiny_cascade import shapes
from cascade_train import evaluate, train
from cascade_train.data.shapes import Scene, Shapes
from cascade_train.engine.loop import Trainer

SEEDS, NEW_SEEDS = range(8), range(8, 16)
"""Of the arms that are compared; and of the baseline against itself, and of conclusions that are measured again."""

CHOOSING_SEED = 1000
"""Of the arms among which a learning rate is chosen."""

QUIET = ("sample.every_steps=null", "checkpoint.every_steps=null", "log.every_steps=1000", "tracker=none")
ASKED_NEW, ASKED_KNOWN, REAL = 60, 90, 400
"""Captions with the new placement and with the others, and real pictures for FID."""

SAMPLING_STEPS = 10
"""Of each painted picture."""

HIGHER = {"learned": True, "kept": True, "shape": True, "validation loss": False, "FID": False}
"""Measure -> whether more is better."""

QUANTILE = 2.3646
"""Of Student's t with seven degrees of freedom, at 97.5 %."""

FASTER = 0.15
"""Steps whose time differs by less from the baseline's count as equally long; with equal work it differed by 12 %."""


def pictures(only: str, samples: int, seed: int) -> Shapes:
    """Return procedural pictures of the words of `data.only`, as it is written in an override."""
    return shapes({"samples": samples, "seed": seed, "only": only.strip("[]").split(",")}, 96)


@cache
def asked() -> tuple[Scene, ...]:
    """Return the scenes that every arm paints, the new placement first."""
    new = (scene for scene in map(pictures(NEW, 10_000, 4242).scene, range(10_000)) if scene.position == "sides")
    known = map(pictures(KNOWN, ASKED_KNOWN, 4243).scene, range(ASKED_KNOWN))
    return (*itertools.islice(new, ASKED_NEW), *known)


def write_real(folder: Path) -> None:
    """Write the real pictures: as many with the new placement as without, in the shares of the captions."""
    new, known = pictures(NEW, 4000, 4244), pictures(KNOWN, 4000, 4245)
    of_new = [row for row in range(4000) if new.scene(row).position == "sides"]
    count = REAL * ASKED_NEW // (ASKED_NEW + ASKED_KNOWN)
    drawn = [new.draw(row)[2] for row in of_new[:count]] + [known.draw(row)[2] for row in range(REAL - count)]
    for number, picture in enumerate(drawn):
        picture.save(folder / f"{number:04}.png")


def overrides(row: Row | None, seed: int, steps: int, rate: float | None) -> list[str]:
    """Return the overrides of an arm."""
    own = [] if row is None else [*row.overrides]
    chosen = [] if rate is None else [f"optimizer.lr={rate}"]
    data = "data.source.seed" if "data=regularised" in own else "data.seed"  # each seed has pictures of its own
    changed = {each.split("=")[0].lstrip("~") for each in (*own, *chosen)}
    kept = [each for each in BASELINE if each.split("=")[0] not in changed]
    own = [each for each in own if not each.startswith("~")]
    return [*kept, *own, *chosen, *QUIET, f"run.seed={seed}", f"{data}={seed}", f"train.max_steps={steps}"]


def measured(row: Row | None, seed: int, steps: int, rate: float | None, real: Path) -> dict[str, float]:
    """Train an arm, paint with it, and return its measures."""
    with tempfile.TemporaryDirectory() as folder:
        held_out = ("validate.share=0.2", f"validate.every_steps={steps}")
        run = train(*overrides(row, seed, steps, rate), *held_out, f"run.dir={folder}/run")
        prompts = [scene.sentence() for scene in asked()]
        out = Path(folder) / "judged"
        painting = {"seed": 0, "steps": SAMPLING_STEPS, "batch_size": 75}
        verdict = evaluate(run, prompts, real=str(real), **painting, out=str(out), track=False)
        painted = [np.asarray(Image.open(file).convert("RGB")) / 255 for file in sorted((out / "pictures").iterdir())]
    new, known = (
        accuracies(painted[part], asked()[part]) for part in (slice(ASKED_NEW), slice(ASKED_NEW, len(painted)))
    )
    return {
        "learned": new["position"],
        "kept": known["position"],
        "shape": known["shape"],
        "validation loss": run.metrics.get("validate_ema/loss", run.metrics["validate/loss"]),  # of what paints
        "FID": verdict.measures["fid"],
    }


def pace(row: Row, rate: float | None) -> float:
    """Return the CPU time of the method's step over the baseline's, the median of three turns of ten steps each."""
    ratios = []
    for _ in range(3):
        seconds = [step_seconds(each, rate if each is row else None) for each in (None, row)]
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def step_seconds(row: Row | None, rate: float | None) -> float:
    """Return the median CPU time of a step, the first three left out."""
    taken: list[float] = []
    plain = Trainer.train_step

    def timed(self: Trainer, *args: Any, **options: Any) -> Any:
        begun = time.process_time()
        result = plain(self, *args, **options)
        taken.append(time.process_time() - begun)
        return result

    with tempfile.TemporaryDirectory() as folder:
        Trainer.train_step = timed  # type: ignore[method-assign]
        try:
            train(*overrides(row, CHOOSING_SEED, 13, rate), f"run.dir={folder}/run")
        finally:
            Trainer.train_step = plain  # type: ignore[method-assign]
    return statistics.median(taken[3:])


class Notebook:
    """The arms that were measured, one line of JSON each, appended to by several processes.

    Attributes:
        rows: the lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def find(self, **key: Any) -> dict[str, Any] | None:
        """Return the line with these values."""
        return next((row for row in self.rows if row.items() >= key.items()), None)

    def find_or(self, work: Any, **key: Any) -> dict[str, Any]:
        """Return the line with these values, or do the work and write what it returns."""
        row = self.find(**key)
        if row is None:
            row = {**key, "found": work(), "commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
            self.rows.append(row)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return row


def run_row(book: Notebook, name: str, real: Path, seeds: Iterable[int]) -> None:
    """Measure whichever of the seeds a method, or the baseline, lacks, of equal seconds too where its pace is known."""
    row = ROWS.get(name)
    arm = partial(measured, row, real=real)
    tried = {
        each: book.find_or(
            partial(arm, CHOOSING_SEED, STEPS, each), row=name, seed=CHOOSING_SEED, steps=STEPS, rate=each
        )["found"]
        for each in (() if row is None else row.rates)
    }
    rate = max(tried, key=lambda each: tried[each]["learned"] + tried[each]["kept"], default=None)
    for seed in seeds if row is not None else (*SEEDS, *NEW_SEEDS):
        book.find_or(partial(arm, seed, STEPS, rate), row=name, seed=seed, steps=STEPS, rate=rate)
    ratio = book.find(row=name, pace=True)
    steps = STEPS if ratio is None else equal_seconds(ratio["found"])
    for seed in SEEDS if steps != STEPS else ():
        book.find_or(partial(arm, seed, steps, rate), row=name, seed=seed, steps=steps, rate=rate)


def run_pace(book: Notebook, name: str) -> None:
    """Measure the pace of a method whose seeds are measured."""
    first = book.find(row=name, seed=SEEDS[0], steps=STEPS)
    if name != BASE and first is not None:
        book.find_or(partial(pace, ROWS[name], first["rate"]), row=name, pace=True)


def equal_seconds(ratio: float) -> int:
    """Return the steps that take the baseline's seconds."""
    return STEPS if abs(ratio - 1) < FASTER else max(1, round(STEPS / ratio))


BASE, TUNED = "baseline", "AdamW, its rate chosen"


def values(book: Notebook, name: str, steps: int, seeds: Iterable[int]) -> dict[str, np.ndarray] | None:
    """Return each measure of an arm by seed; None where one is missing."""
    found = [
        next((r for r in book.rows if (r["row"], r.get("seed"), r.get("steps")) == (name, seed, steps)), None)
        for seed in seeds
    ]
    if any(each is None for each in found):
        return None
    return {measure: np.array([each["found"][measure] for each in found if each]) for measure in HIGHER}


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """Return the mean of the paired differences of eight seeds, and Student's interval of 95 %."""
    assert len(differences) == len(SEEDS), "the quantile is of so many"
    mean, half = differences.mean(), QUANTILE * differences.std(ddof=1) / len(differences) ** 0.5
    return float(mean), float(mean - half), float(mean + half)


def against_itself(of_base: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Return in how many cells the interval of the baseline against itself covers zero, of how many.

    A cell is a measure, with one half of the seeds against the other, halved in 20 ways.
    """
    covered = cells = 0
    for turn in range(20):
        order = np.random.default_rng(turn).permutation(len(SEEDS) + len(NEW_SEEDS))
        for found in of_base.values():
            _, low, high = interval(found[order[: len(SEEDS)]] - found[order[len(SEEDS) :]])
            covered += low <= 0.0 <= high
            cells += 1
    return covered, cells


def cell(differences: np.ndarray, measure: str) -> str:
    """Return a difference with its interval, in bold where it lies on one side of zero."""
    scale = 100 if measure in ("learned", "kept", "shape") else 1
    mean, low, high = (scale * each for each in interval(differences))
    form = "+.1f" if scale == 100 else "+.4f" if measure == "validation loss" else "+.2f"
    text = f"{mean:{form}} [{low:{form}}, {high:{form}}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def table(book: Notebook) -> Iterator[str]:
    """Yield the lines of the tables, a group each; methods that were not measured are named."""
    of_base = values(book, BASE, STEPS, SEEDS)
    if of_base is None:
        yield "The baseline is not measured yet."
        return
    yield "| the baseline itself | " + " | ".join(HIGHER) + " |"
    yield "|---" * (len(HIGHER) + 1) + "|"
    means = (f"{(100 if m in ('learned', 'kept', 'shape') else 1) * v.mean():.4g}" for m, v in of_base.items())
    yield "| mean of the seeds | " + " | ".join(means) + " |"
    for group, names in itertools.groupby(ROWS, key=lambda name: ROWS[name].group):
        yield from ("", f"## {group.capitalize()}", "")
        yield "| method | " + " | ".join(HIGHER) + " | step | learned, equal seconds | kept, equal seconds |"
        yield "|---" * (len(HIGHER) + 4) + "|"
        yield from (line(book, name, of_base) for name in names)


def line(book: Notebook, name: str, of_base: Mapping[str, np.ndarray]) -> str:
    """Return the line of a method: differences from the baseline."""
    chosen = f"`{' '.join(ROWS[name].overrides)}`"
    found, ratio = values(book, name, STEPS, SEEDS), book.find(row=name, pace=True)
    if found is None:
        return f"| {name}, {chosen} | not measured |" + " |" * (len(HIGHER) + 2)
    rate = next(r["rate"] for r in book.rows if r["row"] == name and r.get("seed") == SEEDS[0])
    cells = [cell(found[measure] - of_base[measure], measure) for measure in HIGHER]
    timed = None if ratio is None else values(book, name, equal_seconds(ratio["found"]), SEEDS)
    cells += ["" if ratio is None else f"{ratio['found']:.2f}"]
    cells += ["" if timed is None else cell(timed[m] - of_base[m], m) for m in ("learned", "kept")]
    return f"| {name}, {chosen}{'' if rate is None else f', lr {rate:g}'} | " + " | ".join(cells) + " |"


def again(book: Notebook) -> Iterator[str]:
    """Yield the lines of the table of methods that were measured with the new seeds as well."""
    yield from compared(book, "Again, with eight seeds of their own", ROWS, BASE, NEW_SEEDS)
    yield from compared(book, "Again, against AdamW at its rate", [n for n in ROWS if n != TUNED], TUNED, NEW_SEEDS)


def tuned(book: Notebook) -> Iterator[str]:
    """Yield the lines of the table of methods whose learning rate was chosen, against AdamW with its own chosen."""
    names = [name for name, row in ROWS.items() if row.rates and name != TUNED]
    yield from compared(book, "Against AdamW, both at the rate that was chosen for them", names, TUNED, SEEDS)


def compared(book: Notebook, title: str, names: Iterable[str], base: str, seeds: Iterable[int]) -> Iterator[str]:
    """Yield the lines of a table of the methods that were measured with these seeds, against one of them."""
    of_base, found = values(book, base, STEPS, seeds), {name: values(book, name, STEPS, seeds) for name in names}
    if of_base is None or not any(found.values()):
        return
    yield from ("", f"## {title}", "", "| method | " + " | ".join(HIGHER) + " |", "|---" * (len(HIGHER) + 1) + "|")
    for name, own in found.items():
        if own is not None:
            yield f"| {name} | " + " | ".join(cell(own[m] - of_base[m], m) for m in HIGHER) + " |"


def draw(book: Notebook) -> Figure:
    """Return a panel for each group: how much more of the new placement is learned, and of the others kept."""
    of_base = values(book, BASE, STEPS, SEEDS)
    groups = {name: [*rows] for name, rows in itertools.groupby(ROWS, key=lambda name: ROWS[name].group)}
    heights = [1 + len(rows) for rows in groups.values()]
    figure = Figure(figsize=(7.2, 0.24 * sum(heights) + 1), layout="constrained", facecolor="white")
    panels = figure.subplots(len(groups), sharex=True, height_ratios=heights)
    for panel, (group, rows) in zip(panels, groups.items(), strict=True):
        panel.axvline(0, color="0.6", linewidth=0.8)
        panel.set(title=group, yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.4, -0.6))
        for place, name in enumerate(rows):
            found = values(book, name, STEPS, SEEDS)
            if found is None or of_base is None:
                continue
            for measure, colour, shift in (("learned", "tab:blue", -0.12), ("kept", "tab:orange", 0.12)):
                mean, low, high = (100 * each for each in interval(found[measure] - of_base[measure]))
                panel.errorbar(mean, place + shift, xerr=[[mean - low], [high - mean]], fmt="o", ms=4, color=colour)
    panels[-1].set_xlabel("points of accuracy beyond the baseline: learned (blue), kept (orange)")
    return figure


def page(book: Notebook) -> list[str]:
    """Return the lines of the page."""
    both = values(book, BASE, STEPS, (*SEEDS, *NEW_SEEDS))
    lines = [
        "# The laboratory",
        "",
        f"`python bench/laboratory.py`, {len(SEEDS)} seeds of {STEPS} steps. Paired differences from the baseline with",
        "Student's interval of 95 %, in bold where it lies on one side of zero; shares are in percent.",
        "Of validation loss and FID less is better; weights, losses and times change what a validation loss measures.",
        "`step`: CPU time of a step over the baseline's, where a method does other work. Where they differ by",
        f"more than {FASTER:.0%}, the last two columns are of as many steps as take the baseline's seconds.",
        "",
        f"Baseline: `{' '.join(BASELINE)}`",
        "",
    ]
    if both is not None:
        covered, cells = against_itself(both)
        lines += [f"The baseline against itself: {covered} of {cells} intervals cover zero.", ""]
    return [*lines, *table(book), *tuned(book), *again(book)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, or write the page, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--book", type=Path, default=Path(__file__).parent / "results" / "laboratory.jsonl")
    parser.add_argument("--rows", nargs="*", default=[BASE, *ROWS], choices=[BASE, *ROWS], metavar="METHOD")
    parser.add_argument("--worker", default="0/1", help="K/N: measure each Nth method from the Kth on")
    parser.add_argument("--pace", action="store_true", help="measure how long steps of measured methods take")
    parser.add_argument("--again", action="store_true", help="measure with the new seeds")
    parser.add_argument("--page", type=Path, help="write the page of what is measured and its picture, nothing else")
    args = parser.parse_args(argv)
    book = Notebook(args.book)
    if args.page is not None:
        args.page.write_text("\n".join(page(book)) + "\n")
        draw(book).savefig(args.page.with_suffix(".png"), dpi=100)
        return 0
    torch.set_num_threads(1)
    number, count = map(int, args.worker.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        write_real(Path(folder))
        for name in args.rows[number::count]:
            if args.pace:
                run_pace(book, name)
            else:
                run_row(book, name, Path(folder), NEW_SEEDS if args.again else SEEDS)
            print(f"{name}: measured", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
