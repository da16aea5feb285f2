"""How long the loop waits for a checkpoint: written beside it, and by it, in the same run.

    python bench/checkpoint.py --gib 1 --out bench/results/checkpoint.md

Both ways take turns on the same state, so that the ratio is the claim; seconds are those of this disk. For a synthetic
state of the given size, and for real runs of `model=c_tiny`, whose wait is what `Trainer.save` takes. And the CPU
seconds, user and system, of a save until it is published, beside those of its parts alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver

from cascade_train.__main__ import launch
from cascade_train.distributed.process_group import process_group
from cascade_train.engine.checkpoint.folder import Retention, hash_file
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.loop import Trainer

TENSORS = 64
STEP_SECONDS = 0.05
"""How long a step of the synthetic loop computes."""


def synthetic_state(gib: float) -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors of so many GiB in all, in fp32."""
    numbers = int(gib * 2**30 / 4 / TENSORS)
    return {"weights": {f"layer_{i}": torch.full((numbers,), float(i)) for i in range(TENSORS)}}


def step(matrix: torch.Tensor) -> float:
    """Compute for about a step's time; return the seconds."""
    begun, end = time.perf_counter(), time.perf_counter() + STEP_SECONDS
    while time.perf_counter() < end:
        matrix @ matrix
    return time.perf_counter() - begun


def synthetic(gib: float, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Return the seconds that `save` kept the loop, by way, and how long a save beside it took in all."""
    seen: dict[str, list[float]] = {"waits": [], "beside": [], "beside, until published": []}
    state, matrix = synthetic_state(gib), torch.ones(512, 512)
    with process_group():
        keep_one = Retention(keep_last=1)
        stores = {
            "waits": CheckpointStore(directory / "waits", retention=keep_one),
            "beside": CheckpointStore(directory / "beside", retention=keep_one, asynchronous=True),
        }
        for number in range(1, rounds + 2):
            for way, store in stores.items():
                begun = time.perf_counter()
                store.save(number, state, {})
                kept = time.perf_counter() - begun
                while store._in_flight is not None and not store._in_flight.done():
                    step(matrix)
                store.wait()
                if number > 1:  # the first save makes buffers and directories
                    seen[way].append(kept)
                    if way == "beside":
                        seen["beside, until published"].append(time.perf_counter() - begun)
    return seen


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time, user and system, that this process takes for `work`, in all its threads."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def processor(gib: float, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Return the CPU seconds of a save until it is published and of its parts; the first included."""
    state, folder = synthetic_state(gib), directory / "parts"

    def write() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        state_dict_saver.save(state, storage_writer=FileSystemWriter(folder))

    def save(store: CheckpointStore, number: int) -> None:
        store.save(number, state, {})
        store.wait()

    with process_group():
        keep_one = Retention(keep_last=1)
        beside = CheckpointStore(directory / "beside", retention=keep_one, asynchronous=True)
        waits = CheckpointStore(directory / "waits", retention=keep_one)
        parts: dict[str, Callable[[int], object]] = {
            "a save beside the loop, until published": lambda number: save(beside, number),
            "a save that waits, until published": lambda number: save(waits, number),
            "torch's DCP alone": lambda number: write(),
            "its files read back and hashed": lambda number: [hash_file(each) for each in folder.iterdir()],
        }
        seen: dict[str, list[float]] = {name: [] for name in parts}
        for number in range(1, rounds + 2):
            for name, part in parts.items():
                seen[name].append(cpu_seconds(lambda part=part, number=number: part(number)))  # type: ignore[misc]
    return seen


def tiny_runs(rounds: int, directory: Path) -> dict[str, list[float]]:
    """Return the seconds that `Trainer.save` took in runs of both ways, taking turns; the first of a run left out."""
    seen: dict[str, list[float]] = {"waits": [], "beside": []}
    taken: list[float] = []
    save = Trainer.save

    def timed(self: Trainer) -> None:
        begun = time.perf_counter()
        save(self)
        taken.append(time.perf_counter() - begun)

    Trainer.save = timed  # type: ignore[method-assign]
    for number in range(rounds):
        for way, value in (("waits", "false"), ("beside", "true")):
            taken.clear()
            code = launch(
                [
                    *("task=finetune", "model=c_tiny", "train.max_steps=12", "train.global_batch_size=8"),
                    *("sample.every_steps=null", "checkpoint.every_steps=3", f"checkpoint.asynchronous={value}"),
                    f"run.dir={directory}/{way}_{number}",
                ]
            )
            assert code == 0
            seen[way] += taken[1:]
    return seen


def report(
    results: dict[str, dict[str, list[float]]], processor: dict[str, list[float]], command: str, load: str
) -> str:
    """Return the page: medians, how many times shorter the wait is, and where the CPU time goes."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    lines = [
        "# How long the loop waits for a checkpoint",
        "",
        f"    {command}",
        "",
        f"Commit {commit.strip()}, {datetime.now(UTC):%Y-%m-%d}. {platform.machine()}, {os.cpu_count()} cores, torch"
        f" {torch.__version__}, one rank on the CPU.",
        f"Load of the machine before and after: {load}. Both ways take turns, so ratios are the claims.",
        "",
        "| state | saves of each way | waits for the disk, s | beside: copies only, s | times | until published, s |",
        "|---|---|---|---|---|---|",
    ]
    for name, seen in results.items():
        waits, beside = statistics.median(seen["waits"]), statistics.median(seen["beside"])
        whole = seen.get("beside, until published")
        shown = f"{statistics.median(whole):.3f}" if whole else ""
        lines.append(
            f"| {name} | {len(seen['beside'])} | {waits:.3f} | {beside:.3f} | {waits / beside:.1f} | {shown} |"
        )
    rows = [
        f"| {name} | {first:.2f} | {statistics.median(later):.2f} | {min(later):.2f} | {max(later):.2f} |"
        for name, (first, *later) in processor.items()
    ]
    lines += ["", "Medians. On a GPU the copy is one transfer into pinned memory; not measured here."]
    lines += ["", "CPU seconds, user and system, taking turns in one process, of the same state:", ""]
    lines += ["| what | first | median of the later | least | most |", "|---|---|---|---|---|", *rows]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = f"python bench/checkpoint.py --gib {args.gib:g} --rounds {args.rounds} --out {args.out}"
    directory, before = Path(tempfile.mkdtemp()), os.getloadavg()[0]
    try:
        parts = processor(args.gib, args.rounds, directory / "processor")
        results = {
            f"{args.gib:g} GiB in {TENSORS} tensors": synthetic(args.gib, args.rounds, directory / "synthetic"),
            "`model=c_tiny`, whole runs": tiny_runs(max(1, args.rounds // 3), directory / "runs"),
        }
    finally:
        shutil.rmtree(directory)
    page = report(results, parts, command, f"{before:.1f}, {os.getloadavg()[0]:.1f}")
    print(page)
    if args.out is not None:
        args.out.write_text(page)


if __name__ == "__main__":
    main()
