"""Training that is killed again and again, beside the same training left alone.

    make soak STEPS=2000 KILL_EVERY=100

Two ranks train to the end undisturbed, their memory noted. Two ranks train the same with a kill at a random moment
about every `--kill-every` steps, started again by the same command. Both must end with the same bits: exported
weights, last checkpoint, metrics of every step. Ends with 1 where anything is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

import torch
from safetensors.torch import load_file

from bench.soak_ranks import END_SECONDS, RANKS, SMALL_NETWORK, End, Kill, Ranks, moments

ROOT = Path(__file__).resolve().parents[1]

MOST_MORE = {"mib": 0.03, "files": 2.0, "threads": 2.0}
"""Growth from the second quarter of a run to the last: of resident memory as a share, of open files and threads as a
number. A save in flight has one of each, so that means of samples differ."""

BY_THE_CLOCK = {"images_per_second", "data_wait_share"}


def arguments(run: Path, steps: int) -> list[str]:
    """Arguments of the training: saves are frequent and beside the loop, data comes from workers."""
    return [
        *SMALL_NETWORK,
        *("task=finetune", "train.global_batch_size=4", "ema.decay=0.99", "data.num_workers=1"),
        *("log.every_steps=5", "checkpoint.every_steps=5", "sample.every_steps=null"),
        *(f"train.max_steps={steps}", f"run.dir={run}"),
    ]


def train_undisturbed(folder: Path, steps: int) -> list[str]:
    """Train to the end and return what of each rank's memory, files and threads grew."""
    run, notes = fresh(folder, "undisturbed")
    end = Ranks(arguments(run, steps), notes, memory_every_steps=max(1, steps // 40)).end()
    expect(end, (0,) * RANKS, notes)
    return [f"rank {rank}: {text}" for rank in range(RANKS) for text in growth(notes / f"memory_{rank}.jsonl", steps)]


def train_disturbed(folder: Path, kills: Sequence[Kill], steps: int) -> list[int]:
    """Train to the end through all kills and return the steps in which ranks were killed."""
    run, notes = fresh(folder, "disturbed")
    command, killed = arguments(run, steps), []
    for number, kill in enumerate(kills):
        ranks = Ranks(command, notes / str(number), memory_every_steps=steps)
        ranks.kill(kill)
        killed.append(ranks.step())
        survivors = tuple(-9 if rank in kill.ranks else 1 for rank in range(RANKS))
        expect(ranks.end(within_seconds=END_SECONDS), survivors, notes / str(number))
    last = Ranks(command, notes / "last", memory_every_steps=steps)
    expect(last.end(), (0,) * RANKS, notes / "last")
    return killed


def fresh(folder: Path, name: str) -> tuple[Path, Path]:
    """Where a run and its notes lie, without those of an interrupted soak."""
    shutil.rmtree(folder / name, ignore_errors=True)
    shutil.rmtree(folder / f"{name}_notes", ignore_errors=True)
    return folder / name, folder / f"{name}_notes"


def expect(end: End, codes: tuple[int, ...], notes: Path) -> None:
    """End the soak where ranks ended otherwise than they must, with what they said.

    Raises:
        SystemExit: they did.
    """
    said = "\n".join(file.read_text() for file in sorted(notes.glob("said_*")))
    if end.codes != codes or end.hung or end.orphans or "Traceback" in said:
        sys.exit(f"{end} instead of {codes}, or a traceback, in {notes}:\n{said[-4000:]}")


def growth(notes: Path, steps: int) -> list[str]:
    """What grew from the mean of the second quarter of a run to that of the last by more than is allowed."""
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    second = [row for row in rows if steps / 4 <= row["step"] < steps / 2]
    last = [row for row in rows if row["step"] >= 3 * steps / 4]
    grown = []
    for name, most in MOST_MORE.items():
        before, after = (mean(row[name] for row in quarter) for quarter in (second, last))
        if after - before > most * (before if name == "mib" else 1):
            grown.append(f"{name} grew from {before:.1f} to {after:.1f}")
    return grown


def differences(one: Path, other: Path, steps: int) -> list[str]:
    """Where two runs differ by a bit: exported weights, last checkpoint, metrics of every step."""
    differing = []
    files = sorted(path.relative_to(one) for path in (one / "export").rglob("*.safetensors"))
    assert files, "nothing was exported"
    for file in files:
        mine, others = load_file(one / file), load_file(other / file)
        assert mine.keys() == others.keys()
        differing += [f"{file}: {name}" for name, value in mine.items() if not same_bits(value, others[name])]
    mine, others = (records(run, steps) for run in (one, other))
    differing += [f"checkpoint of step {steps}: {name}" for name in mine | others if mine.get(name) != others.get(name)]
    rows, others_rows = metrics(one), metrics(other)
    if len(rows) != len(others_rows):
        return [*differing, f"metrics of {len(rows)} and {len(others_rows)} steps"]
    return differing + [f"metrics of step {a['step']}" for a, b in zip(rows, others_rows, strict=True) if a != b]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def records(run: Path, step: int) -> Mapping[str, Any]:
    """Sizes and hashes of the tensor files of a checkpoint: weights, average and optimizer state."""
    files = json.loads((run / "checkpoints" / f"step_{step}" / "manifest.json").read_text())["files"]
    return {name: record for name, record in files.items() if name.endswith(".distcp")}


def metrics(run: Path) -> list[dict[str, Any]]:
    """Metrics of every step, without what is read off a clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in BY_THE_CLOCK} for row in rows]


def commit() -> str:
    """Commit of the checkout, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, print what was seen, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="of each of the two trainings")
    parser.add_argument("--kill-every", type=int, default=100, help="steps between kills, on average")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "soak", help="where the runs lie")
    args = parser.parse_args(argv)
    grown = train_undisturbed(args.folder, args.steps)
    kills = list(moments(steps=args.steps, every_steps=args.kill_every, seed=args.seed))
    killed = train_disturbed(args.folder, kills, args.steps)
    differing = differences(args.folder / "undisturbed", args.folder / "disturbed", args.steps)
    print(f"commit {commit()}: {len(killed)} kills, in the steps {killed} (0 = before the first of that start)")
    print("\n".join([*grown, *differing]) or "the same bits as undisturbed, and nothing grew")
    return 1 if grown or differing else 0


if __name__ == "__main__":
    sys.exit(main())
