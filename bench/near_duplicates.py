"""What looking for near-duplicates costs: the hash of a picture, and all pairs of so many hashes; as a page.

python bench/near_duplicates.py --out bench/results/near_duplicates.md

The comparison of every hash with every other is timed in the same run, where there are few enough, and must find the
same pairs.
"""

from __future__ import annotations

import argparse
import platform
import resource
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

from bench.soak import commit
from cascade_train.data.survey.look import DISTANCE, look_of, near_pairs

COUNTS = (10_000, 100_000, 1_000_000)
MOST_COMPARED = 10_000
PLANTED = 1000


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (1024, 1024, 3), dtype=np.uint8)
    hashing, _ = cpu_seconds(lambda: [look_of(pixels) for _ in range(20)])
    where = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    lines = [
        *("# Near-duplicates", "", "    python bench/near_duplicates.py --out bench/results/near_duplicates.md", ""),
        f"Commit {commit()}, {datetime.now(UTC):%Y-%m-%d}. {where}.",
        f"CPU seconds, one thread; random hashes, {PLANTED} of them near another.",
        *("", f"The hash of 1024 x 1024 decoded pixels takes {hashing / 20 * 1e3:.1f} ms.", ""),
        f"| hashes | pairs within {DISTANCE} of 64 bits | CPU s | each with each, CPU s | peak memory, MB |",
        "|---|---|---|---|---|",
    ]
    for count in COUNTS:
        hashes = generator.integers(0, 2**64, count, dtype=np.uint64)
        hashes[:PLANTED] = hashes[PLANTED : 2 * PLANTED] ^ np.uint64(0b1011)
        seconds, pairs = cpu_seconds(lambda hashes=hashes: near_pairs(hashes, DISTANCE))
        plain = ""
        if count <= MOST_COMPARED:
            whole, expected = cpu_seconds(lambda hashes=hashes: every_pair(hashes))
            assert np.array_equal(pairs, expected)
            plain = f"{whole:.2f}"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        lines.append(f"| {count:,} | {len(pairs):,} | {seconds:.2f} | {plain} | {peak:.0f} |")
    page = "\n".join([*lines, ""])
    sys.stdout.write(page)
    if args.out is not None:
        args.out.write_text(page)


def every_pair(hashes: np.ndarray) -> np.ndarray:
    """Return the pairs within the distance, by comparing each hash with all behind it."""
    found = [np.zeros((0, 2), dtype=np.int64)]
    for place, value in enumerate(hashes):
        near = np.flatnonzero(np.bitwise_count(hashes[place + 1 :] ^ value) <= DISTANCE) + place + 1
        found.append(np.stack([np.full_like(near, place), near], axis=1))
    return np.concatenate(found)


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and what it returns."""
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


if __name__ == "__main__":
    main()
