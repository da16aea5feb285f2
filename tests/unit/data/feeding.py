"""Feeds of streams over small tars."""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path
from typing import Any

from cascade_train.data.webdataset import WebDataset
from tests.unit.data import tars
from tests.unit.data.dataset_contract import loading

LENGTHS = (5, 9, 2, 12, 7, 4)
SAMPLES = sum(LENGTHS)


def urls(folder: Path) -> list[str]:
    """Write six tars: two compressed, two for pipes, two plain; return their urls."""
    first, found = 0, []
    for number, length in enumerate(LENGTHS):
        path = tars.write(folder / f"{number}.tar", tars.samples(range(first, first + length)))
        first += length
        if number < 2:
            path = path.rename(folder / f"{number}.tar.gz")
            path.write_bytes(gzip.compress(path.read_bytes()))
        found.append(f"pipe:cat {path}" if number in (2, 3) else str(path))
    return found


def streamed(given: Any, **options: Any) -> WebDataset:
    """Make a source of streams with small blocks."""
    return tars.webdataset(given, **{"buffer_samples": 4, "crop": "random", **options})


feeding = partial(loading, global_batch_size=6)
"""Open a source and stream all of it."""
