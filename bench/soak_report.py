"""What a soak found: its comparison, its growth of memory, its verdicts, its page. Trains nothing."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors.torch import load_file

MOST_GROWTH = 0.03
"""Of the resident memory, from the mean of the second quarter to that of the last. The first 20 saves or so are before:
until then the thread of each takes memory of its own from malloc."""

MOST_MORE = 2.0
"""Open files and threads; a save in flight has one of each, so that means of samples differ."""

BY_THE_CLOCK = {"images_per_second", "data_wait_share"}


def growth(rows: Sequence[Mapping[str, float]], steps: int) -> dict[str, list[float]]:
    """Return the means of the second and of the last quarter of a run, of all that was noted beside the step."""
    second = [row for row in rows if steps / 4 <= row["step"] < steps / 2]
    last = [row for row in rows if row["step"] >= 3 * steps / 4]
    names = [name for name in rows[0] if name != "step"]
    return {name: [mean(row[name] for row in quarter) for quarter in (second, last)] for name in names}


def differences(one: Path, other: Path, steps: int) -> list[str]:
    """Return where two runs differ by a bit: exported weights, last checkpoint, metrics of every step."""
    found = []
    files = sorted(path.relative_to(one) for path in (one / "export").rglob("*.safetensors"))
    assert files, "nothing was exported"
    for file in files:
        mine, others = load_file(one / file), load_file(other / file)
        assert mine.keys() == others.keys()
        found += [f"{file}: {name}" for name, value in mine.items() if not same_bits(value, others[name])]
    mine, others = (records(run, steps) for run in (one, other))
    found += [f"checkpoint of step {steps}: {name}" for name in mine | others if mine.get(name) != others.get(name)]
    mine, others = metrics(one), metrics(other)
    if [row["step"] for row in mine] != list(range(1, steps + 1)) or len(others) != steps:
        return [*found, f"metrics of {len(mine)} and {len(others)} steps"]
    return found + [f"metrics of step {a['step']}" for a, b in zip(mine, others, strict=True) if a != b]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether dtype, shape and every bit are equal."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def records(run: Path, step: int) -> dict[str, Any]:
    """Return sizes and hashes of the tensor files of a checkpoint: weights, average and optimizer state."""
    files = json.loads((run / "checkpoints" / f"step_{step}" / "manifest.json").read_text())["files"]
    return {name: record for name, record in files.items() if name.endswith(".distcp")}


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of every step, without what is read off a clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in BY_THE_CLOCK} for row in rows]


def verdicts(done: Mapping[str, Any], passes: int) -> list[tuple[str, bool]]:
    """Return what was asked for, each with whether it was found."""
    kills, memory = done["disturbed"]["kills"], done["undisturbed"]["memory"]
    wanted = done["settings"]["steps"] // done["settings"]["kill_every"]
    apart = done["differences"]
    grown = max(after / before - 1 for rank in memory for before, after in [rank["mib"]])
    more = max(after - before for rank in memory for name in ("files", "threads") for before, after in [rank[name]])
    passed = sum(each["code"] == 0 for each in done["passes"][:passes])
    ends_same = "exported weights, last checkpoint and metrics are those of the undisturbed run, bit for bit"
    return [
        (f"{len(kills)} kills ({wanted} asked), each survived by a start of the same command", len(kills) == wanted),
        (ends_same if not apart else f"the runs differ: {', '.join(apart[:8])}", not apart),
        (f"memory: {grown:+.1%} (at most {MOST_GROWTH:.0%})", grown <= MOST_GROWTH),
        (f"open files and threads: {more:+.1f} (at most {MOST_MORE:.0f})", more <= MOST_MORE),
        (f"the tests of several ranks passed {passed} times ({passes} asked)", passed == passes),
    ]


def page(done: Mapping[str, Any], passes: int) -> str:
    """Return the page of a soak."""
    settings, undisturbed, disturbed = done["settings"], done["undisturbed"], done["disturbed"]
    sizes = f"STEPS={settings['steps']} KILL_EVERY={settings['kill_every']} SEED={settings['seed']} PASSES={passes}"
    of_tests = sum(each["seconds"] for each in done["passes"][:passes])
    kills = (f"{'+'.join(str(rank) for rank in each['ranks'])} in {each['step']}" for each in disturbed["kills"])
    return "\n".join(
        [
            "# Killed again and again",
            "",
            f"    make soak {sizes}",
            "",
            f"Commit {settings['commit']}, {datetime.now(UTC):%Y-%m-%d}. {platform.machine()}, {os.cpu_count()} cores,",
            f"Python {platform.python_version()}, torch {torch.__version__}. Two ranks on the CPU, a small network,",
            "asynchronous saves every 5 steps, one data worker per rank.",
            "",
            *(f"- {'met' if met else 'MISSED'}: {text}" for text, met in verdicts(done, passes)),
            "",
            f"By the clock: undisturbed {undisturbed['seconds']:.0f} s, with kills {disturbed['seconds']:.0f} s,",
            f"the passes of the tests {of_tests:.0f} s.",
            "",
            *memory_table(undisturbed["memory"]),
            "",
            "Killed, in order, rank (or both) and step (0 = before the first step of that start):",
            f"{', '.join(kills)}.",
            "",
        ]
    )


def memory_table(memory: Sequence[Mapping[str, Sequence[float]]]) -> list[str]:
    """Return what each undisturbed rank held, as the means of two quarters of the run."""
    lines = ["| rank | | second quarter | last quarter |", "|---|---|---|---|"]
    for rank, noted in enumerate(memory):
        for name, (before, after) in noted.items():
            unit = "resident memory, MiB" if name == "mib" else name
            lines.append(f"| {rank} | {unit} | {before:.1f} | {after:.1f} |")
    return lines
