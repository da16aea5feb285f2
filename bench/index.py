"""Time and memory until the first batch, and a resume in the middle, against the number of samples and tars.

    python bench/index.py --out bench/results/index.md
    python bench/index.py --tars 10000 --samples 10000 --folder /mnt/large

The tars are empty files; their indexes, as `cascade-train index` leaves them, hold random sizes of pictures. Each
measurement is a process of its own: `memory` joins the tars' indexes at each start, as few tars are opened, `mapped`
maps the joined one. Cold: the pages of all index files are given back to the system first. Seconds are of wall time,
memory is what the process holds for itself alone, above its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

from bench.soak import commit

SIZES = ((100, 1_000), (1_000, 1_000), (1_000, 10_000), (20_000, 100), (10_000, 10_000))
"""Tars, and samples in each."""
LARGEST_IN_MEMORY = 10**7
OPTIONS: dict[str, Any] = {
    "image_size": 1024, "crop": "center", "shuffle_window_shards": 16, "num_workers": 0, "worker_start": "fork",
    "row_filters": None, "index_dir": None, "aspect_ratios": "wide",
}  # fmt: skip
FIELDS = {"open": "open s", "first": "first batch s", "resume": "resume s", "cpu": "CPU s", "private": "private MiB"}


def make(folder: Path, tars: int, samples: int) -> None:
    """Write empty tars and the index of each."""
    from cascade_train.data.index.cache import write_cache
    from cascade_train.data.tar.files import Tar
    from cascade_train.data.tar.index import TAR_FIELDS, index_file
    from cascade_train.data.tar.members import PARTS, Dropped
    from cascade_train.data.tar.storage import LocalFiles

    store, rng = LocalFiles(), np.random.default_rng(0)
    dropped = np.array(json.dumps(asdict(Dropped())))
    for number in range(tars):
        path = folder / f"{number:06d}.tar"
        path.touch()
        os.truncate(path, samples * 100_000)
        table = np.zeros(samples, dtype=TAR_FIELDS)
        table["width"], table["height"] = rng.integers(512, 4096, (2, samples))
        table["image_start"] = np.arange(samples) * 100_000
        checksums = rng.integers(1, 2**55, (samples, 1 + len(PARTS)))
        keys = np.array([b"%06d%06d" % (number, row) for row in range(samples)])
        parts = {"table": table, "keys": keys, "checksums": checksums, "dropped": dropped}
        write_cache(index_file(Tar(item=store.stat(str(path)), store=store), None), parts, required=True)


def private_mib() -> float:
    """Return the memory that no file holds, in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def start(folder: Path, tars: int, kind: str, ratios: int | None) -> dict[str, float]:
    """Open the data as a run does, find the first step and one in the middle; return seconds and MiB."""
    from cascade_train.data.data_set import open_data_set
    from cascade_train.data.tar import index as tar_index
    from cascade_train.data.webdataset import WebDataset

    if kind == "memory":
        tar_index.MANY_TARS = sys.maxsize
    before, begin, cpu = private_mib(), time.perf_counter(), time.process_time()
    url = f"{folder}/{{000000..{tars - 1:06d}}}.tar"
    options = OPTIONS if ratios is None else {**OPTIONS, "aspect_ratios": [1 + n / 32 for n in range(ratios)]}
    data = open_data_set(WebDataset(urls=url, **options), share=None, held_out=None)
    opened = time.perf_counter()
    feed: Any = data.training_feed(seed=0, global_batch_size=1024, micro_batch_size=128, rank=0, ranks=8)
    feed._order.step(0)
    first = time.perf_counter()
    state = feed.state_dict() | {"position": len(data.training.rows) // 2048}
    feed.load_state_dict(state)
    feed._order.step(feed.position)
    seconds = {"open": opened - begin, "first": first - begin, "resume": time.perf_counter() - first}
    return {**seconds, "cpu": time.process_time() - cpu, "private": private_mib() - before}


def forget(folder: Path) -> None:
    """Give the pages of all index files back to the system."""
    os.sync()
    for path in (folder / ".cascade_train_index").rglob("*.np?"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure(folder: Path, tars: int, kind: str, ranks: int = 1, ratios: int | None = None) -> dict[str, float]:
    """Return the largest of each number over processes that start together."""
    command = [sys.executable, __file__, "--start", kind, "--folder", str(folder), "--tars", str(tars)]
    command += [] if ratios is None else ["--ratios", str(ratios)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(ranks)]
    found = [json.loads(each.communicate()[0]) for each in running]
    return {name: max(each[name] for each in found) for name in FIELDS}


def rows(folder: Path, tars: int, samples: int, kinds: list[str]) -> list[str]:
    """Return the lines of the table for one size of data."""
    begin = time.perf_counter()
    make(folder, tars, samples)
    print(f"{tars} x {samples}: made in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    lines = []
    for kind in kinds:
        cases = {"first start": 1, "warm": 1, "warm, 8 ranks": 8, "cold": 1}
        if kind == "memory":
            cases = {"warm": 1, "cold": 1}
        for case, ranks in cases.items():
            if case == "cold":
                forget(folder)
            found = measure(folder, tars, kind, ranks)
            cells = [f"{found[name]:.0f}" if name == "private" else f"{found[name]:.2f}" for name in FIELDS]
            lines.append(f"| {tars * samples:.0e} | {tars:,} | {kind} | {case} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr)
    index = folder / ".cascade_train_index"
    disk = sum(path.stat().st_size for path in index.glob("joined-*/**/*") if path.is_file()) / (tars * samples)
    print(f"{disk:.0f} bytes a sample", file=sys.stderr)
    return [*lines, f"| {tars * samples:.0e} | {tars:,} | mapped | {disk:.0f} bytes a sample on disk | | | | | |"]


def main() -> None:
    """Measure all sizes, or print one start as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tars", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--ratios", type=int)
    parser.add_argument("--start", choices=("memory", "mapped"))
    args = parser.parse_args()
    if args.start:
        print(json.dumps(start(args.folder, args.tars, args.start, args.ratios)))
        return
    sizes = SIZES if args.samples is None else ((args.tars, args.samples),)
    lines = [f"| samples | tars | index | start | {' | '.join(FIELDS.values())} |", f"|{'---|' * (4 + len(FIELDS))}"]
    for tars, samples in sizes:
        folder = Path(tempfile.mkdtemp(dir=args.folder))
        try:
            lines += rows(
                folder, tars, samples, ["memory", "mapped"] if tars * samples <= LARGEST_IN_MEMORY else ["mapped"]
            )
        finally:
            shutil.rmtree(folder)
    print("\n".join(lines))
    if args.out is not None:
        head = f"Commit {commit()}, {datetime.now(UTC):%Y-%m-%d}. {os.cpu_count()} cores."
        what = "`bench/index.py` says what is measured."
        command = f"    python bench/index.py --out {args.out}"
        page = ["# What a start costs against samples and tars", command, f"{head} {what}", "\n".join(lines)]
        args.out.write_text("\n\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
