"""How an optimizer step grows: over batch, width, resolution, depth and workers, beside the bare model.

    python bench/scaling.py --out bench/results/scaling.json

Each point is `task=finetune model=c_tiny` from nothing on one rank, with one thing changed. In the same process three
kinds of steps take turns: bare (plain torch), `loop` (the encoders' results remembered) and `step`, which begins with
reading its batch. Process time of this rank alone: what workers do is not in it, and of a loaded machine only the
ratios hold. Prints a table, writes JSON and beside it a PNG.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

from bench import step as bench
from cascade_train.__main__ import launch
from cascade_train.engine.loop import Trainer

SMALL = ("model.weights=null", "train.global_batch_size=4")
AXES: dict[str, dict[int, tuple[str, ...]]] = {
    "samples of the batch": {n: (f"train.global_batch_size={n}",) for n in (1, 2, 4, 8, 16, 32)},
    "channels": {
        n: (f"model.network.block_out_channels=[{n},{n}]", f"model.network.num_attention_heads=[{n // 32},{n // 32}]")
        for n in (32, 64, 128, 256)
    },
    "pixels of a side": {n: (f"model.image_size={n}",) for n in (64, 96, 128, 192, 256)},
    "units of the network": {
        4 * n: (
            f"model.network.down_num_layers_per_block=[{n},{n}]",
            f"model.network.up_num_layers_per_block=[{n},{n}]",
        )
        for n in (1, 2, 4, 8)
    },
    "workers": {n: (f"data.num_workers={n}",) for n in (0, 1, 2)},
}
"""What is changed, with the number that the chart shows."""
COLOURS = {"bare": "#707070", "loop": "#2040a0", "step": "#c04010"}
LABELS = {"bare": "bare", "loop": "loop", "step": "step, with encoders"}


def measure(trainer: Trainer, rounds: int) -> dict[str, list[float]]:
    """Take turns between bare steps, those of the loop, and those that read and encode; return seconds."""
    stage, feed, seen = trainer.task.stage, iter(trainer.feed), {"bf16": False}
    whole = {name: getattr(stage, name) for name in ("encode", "conditions")}

    def keep(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.setdefault("inputs", (args, kwargs))  # type: ignore[arg-type]

    def choose(functions: Mapping[str, Any]) -> None:
        for name, function in functions.items():
            setattr(stage, name, function)

    hook = stage.network.register_forward_pre_hook(keep, with_kwargs=True)
    trainer.train_step(next(feed))
    hook.remove()
    bare = bench.Bare(trainer, seen)
    remembered = {name: bench.remembering(function) for name, function in whole.items()}
    found: dict[str, list[float]] = {name: [] for name in LABELS}
    for _ in range(rounds + 1):
        choose(whole)
        found["step"].append(bench.seconds(lambda: trainer.train_step(next(feed))))
        choose(remembered)
        batches = next(feed)
        found["loop"].append(bench.seconds(lambda batches=batches: trainer.train_step(batches)))  # type: ignore[misc]
        found["bare"].append(bench.seconds(bare.step))
    return {name: times[1:] for name, times in found.items()}


def be_rank(axis: str, number: int, rounds: int, out: Path) -> None:
    """Measure one point, and write it."""
    torch.set_num_threads(1)

    def looked_at(self: Trainer) -> None:
        out.write_text(json.dumps(measure(self, rounds)))
        self.max_steps = self.step

    Trainer.run = looked_at  # type: ignore[method-assign]
    overrides = [*bench.COMMON, *SMALL, "ema.decay=0.99", f"run.dir={out.with_suffix('')}", *AXES[axis][number]]
    assert launch(overrides) == 0


def charts(points: Mapping[str, Mapping[int, Mapping[str, float]]]) -> Figure:
    """Return a chart of milliseconds for each axis, one below the other."""
    figure = Figure(figsize=(7.2, 3.6 * len(points)), layout="constrained")
    for axes, (axis, medians) in zip(figure.subplots(len(points), squeeze=False)[:, 0], points.items(), strict=True):
        for kind, label in LABELS.items():
            axes.plot(list(medians), [each[kind] for each in medians.values()], "o-", color=COLOURS[kind], label=label)
        axes.set(title=f"milliseconds of a step over {axis}", ylim=(0, None))
        axes.legend(frameon=False)
    return figure


def table(points: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """Return the numbers that the charts show, and the ratio that counts."""
    lines = ["| what | | bare, ms | loop, ms | step, ms | loop / bare |", "|---|---|---|---|---|---|"]
    for axis, medians in points.items():
        for number, each in medians.items():
            times = " | ".join(f"{each[kind]:.0f}" for kind in LABELS)
            lines.append(f"| {axis} | {number} | {times} | {each['loop'] / each['bare']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, write JSON and PNG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="axes whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("bench/results/scaling.json"))
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point is not None:
        return be_rank(args.point[0], int(args.point[1]), args.rounds, args.out)
    seconds: dict[str, dict[int, dict[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for axis, numbers in AXES.items():
            for number in numbers if args.only in axis else ():
                out = Path(folder) / f"{axis.replace(' ', '_')}_{number}.json"
                command = [__file__, "--point", axis, str(number), "--rounds", str(args.rounds), "--out", str(out)]
                bench.run_ranks(command, 1)
                seconds.setdefault(axis, {})[number] = json.loads(out.read_text())
    points = {
        axis: {n: {kind: statistics.median(times) * 1e3 for kind, times in each.items()} for n, each in numbers.items()}
        for axis, numbers in seconds.items()
    }
    facts = bench.facts()
    print(json.dumps(facts), table(points), sep="\n\n")
    args.out.write_text(json.dumps({**facts, "rounds": args.rounds, "seconds": seconds}) + "\n")
    charts(points).savefig(args.out.with_suffix(".png"))
    return None


if __name__ == "__main__":
    main()
