"""What the benchmark of the data path prints: its numbers, its targets, its page."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

import PIL
import torch
import torchvision

from bench.soak import commit

WORKER_RATIO, END_TO_END_RATIO, PSNR_DB, MAIN_MS = 4.0, 5.0, 57.0, 1.0
"""Targets: at least, at least, at least, below."""


@dataclass(frozen=True, kw_only=True)
class PerImage:
    """CPU milliseconds of one picture, medians, and the worst PSNR; `ratio` is the median over neighbouring runs."""

    size: tuple[int, int]
    quality: int
    kib: int
    original_worker: float
    original_main: float
    ours: float
    decode: float
    ratio: float
    psnr: float


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """CPU milliseconds per image of a whole run, and images per second by the clock."""

    main: float
    workers: float
    rate: float

    @property
    def total(self) -> float:
        """Milliseconds of all processes."""
        return self.main + self.workers


Runs = Mapping[tuple[str, tuple[int, int], int], Sequence[EndToEnd]]
"""Runs by path (original or ours), height and width, and number of workers."""


def image_table(rows: Sequence[PerImage]) -> list[str]:
    """Return the table of single pictures."""
    return [
        "| to (H x W) | quality | KiB | original: float + resize, ms | ours, ms | of it decoding | times | PSNR, dB |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.size[0]} x {row.size[1]} | {row.quality} | {row.kib} | {row.original_worker:.1f} +"
            f" {row.original_main:.1f} | {row.ours:.1f} | {row.decode:.1f} | {row.ratio:.1f} | {row.psnr:.2f} |"
            for row in rows
        ),
    ]


def run_table(found: Runs) -> list[str]:
    """Return the table of whole runs."""
    lines = [
        "| to (H x W) | workers | path | main, ms/image | workers, ms/image | images/s/core | images/s by the clock |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, size, workers), runs in sorted(found.items(), key=lambda item: (item[0][1], item[0][2], item[0][0])):
        main, worker, total, rate = (median(getattr(run, key) for run in runs) for key in _COLUMNS)
        lines.append(
            f"| {size[0]} x {size[1]} | {workers} | {name} | {main:.2f} | {worker:.1f} | {1000 / total:.1f} |"
            f" {rate:.1f} |"
        )
    return lines


def times(found: Runs, square: bool, column: str) -> float:
    """Return how many times ours the original takes per image, the median over neighbouring runs."""
    keys = [key for key in found if key[0] == "original" and (key[1][0] == key[1][1]) == square]
    pairs = [pair for key in keys for pair in zip(found[key], found[("ours", *key[1:])], strict=True)]
    return median(getattr(original, column) / getattr(ours, column) for original, ours in pairs)


def verdicts(images: Sequence[PerImage], found: Runs) -> list[tuple[str, bool]]:
    """Return each target with what was measured, and whether it was met."""
    in_worker, in_all = times(found, square=True, column="workers"), times(found, square=False, column="total")
    worst = min(row.psnr for row in images)
    main = max(median(run.main for run in runs) for (name, *_), runs in found.items() if name == "ours")
    return [
        (f"in the worker, one shape: {in_worker:.1f} times ({WORKER_RATIO:g} asked)", in_worker >= WORKER_RATIO),
        (f"end to end, several shapes: {in_all:.1f} times ({END_TO_END_RATIO:g} asked)", in_all >= END_TO_END_RATIO),
        (f"worst PSNR against float: {worst:.2f} dB ({PSNR_DB:g} asked)", worst >= PSNR_DB),
        (f"main process: {main:.2f} ms per image (below {MAIN_MS:g} asked)", main < MAIN_MS),
    ]


def page(command: str, images: Sequence[PerImage], found: Runs, load: str) -> str:
    """Return the Markdown page."""
    checked = [f"- {'met' if met else '**missed**'}: {text}" for text, met in verdicts(images, found)]
    targets, whole_runs, single_pictures = map("\n".join, (checked, run_table(found), image_table(images)))
    return f"""# From a JPEG to a training batch

    {command}

Commit {commit()}, {datetime.now(UTC):%Y-%m-%d}. {platform.machine()}, {os.cpu_count()} cores, Python
{platform.python_version()}, torch {torch.__version__}, torchvision {torchvision.__version__}, Pillow {PIL.__version__}.
{load}
1600 x 1200 JPEGs, 4:2:0. CPU time, one thread, medians. Both paths take turns, so ratios are the claims.

{targets}

## Whole runs

From a tar of all qualities to batches in the main process. To the square, the original's workers resize; to the other
size, as with several aspect ratios, its main process does. Ours does all in the workers.

{whole_runs}

## Single pictures

In one process that keeps its memory: no queue, no shared memory, and no new memory for the original's tensors of 23 MB.
PSNR is against the same part of PIL's pixels resized in float; two roundings to uint8 alone give about 57.4.

{single_pictures}
"""


_COLUMNS = ("main", "workers", "total", "rate")
