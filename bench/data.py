"""Images per second and core from a JPEG to a training batch, beside the original's path in the same run.

    python bench/data.py --out bench/results/data.md

Makes 1600 x 1200 JPEGs of several qualities, then interleaves the two paths picture by picture and run by run, so
that a busy machine slows both alike; times are CPU time on one thread. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

import numpy as np
import torch
from torch import Tensor

from bench import data_original as original
from bench.data_pictures import jpeg, picture, write_set
from bench.data_report import EndToEnd, PerImage, Runs, page, verdicts
from cascade_train.data.decoding.decode import fast_jpeg_decoder
from cascade_train.data.decoding.framing import Box, Framing
from cascade_train.data.loading.feed import Loader
from cascade_train.data.order.position import FeedRequest
from cascade_train.data.webdataset import WebDataset

WIDTH, HEIGHT = 1600, 1200
QUALITIES = (75, 90, 95)
SIZES = ((768, 768), (640, 864))
"""Height and width: the square of 768, and the bucket of the same area that fits pictures of 4 to 3."""
BATCH_SIZE = 8


def timed(run: Callable[[], object]) -> float:
    """Return CPU milliseconds of this process."""
    start = time.process_time()
    run()
    return 1000 * (time.process_time() - start)


def measure_images(images: Sequence[tuple[int, bytes]], size: tuple[int, int], rounds: int) -> list[PerImage]:
    """Time both paths on each picture, one after the other, and compare their pixels."""
    framing = Framing(crop="center", flip_prob=0.0, max_pixels=None)
    fast = fast_jpeg_decoder()
    assert fast is not None, "this environment has no fast decoder to measure"
    rows = []
    for quality in sorted({quality for quality, _ in images}):
        files = [file for each, file in images if each == quality]
        times, errors = [], []
        for file in files:
            whole = original.to_float(file)
            result = framing(file, None, *size, _no_draw)
            errors.append(psnr(result.image, in_float(whole, size, result.box)))
            times += [
                (
                    timed(lambda file=file: original.to_float(file)),
                    timed(lambda whole=whole: original.fit(whole, size)),
                    timed(lambda file=file: framing(file, None, *size, _no_draw)),
                    timed(lambda file=file: fast(file)),
                )
                for _ in range(rounds)
            ]
        medians = [median(column) for column in zip(*times, strict=True)]
        rows.append(
            PerImage(
                size=size,
                quality=quality,
                kib=round(median(len(file) for file in files) / 1024),
                original_worker=medians[0],
                original_main=medians[1],
                ours=medians[2],
                decode=medians[3],
                ratio=median((worker + main) / ours for worker, main, ours, _ in times),
                psnr=min(errors),
            )
        )
    return rows


def in_float(whole: Tensor, size: tuple[int, int], box: Box) -> Tensor:
    """Return the float reference: the same part of PIL's pixels, resized in float."""
    part = whole[:, box.top : box.top + box.height, box.left : box.left + box.width]
    return original.fit(part, size)


def psnr(pixels: np.ndarray, reference: Tensor) -> float:
    """Return the dB between (3, H, W) uint8 and float in [0, 1]."""
    error = torch.from_numpy(pixels).double() / 255 - reference.double()
    return float(-10 * error.square().mean().log10())


def our_batches(tar: Path, size: tuple[int, int], workers: int) -> Loader:
    """Return the library's loader over a tar."""
    source = WebDataset(
        urls=str(tar),
        index_dir=None,
        row_filters=None,
        image_size=768,
        aspect_ratios=None if size == (768, 768) else ["3/4"],
        crop="center",
        shuffle_window_shards=1,
        num_workers=workers,
        worker_start="fork",
    )
    index = source.open()
    request = FeedRequest(
        index=index,
        rows=np.arange(len(index)),
        seed=0,
        global_batch_size=BATCH_SIZE,
        micro_batch_size=BATCH_SIZE,
        rank=0,
        ranks=1,
    )
    return Loader(source, request)


def run_ours(tar: Path, size: tuple[int, int], workers: int, count: int) -> EndToEnd:
    """Time a run of our loader."""
    loader = our_batches(tar, size, workers)
    try:
        return measure_run((step[0].image_BCHW for step in loader), size, count)
    finally:
        loader.close()


def run_original(tar: Path, size: tuple[int, int], workers: int, count: int) -> EndToEnd:
    """Time a run of the original's path for this size."""
    path = original.square if size[0] == size[1] else original.bucketed
    return measure_run(path(tar, size, BATCH_SIZE, workers), size, count)


def measure_run(batches: Iterator[Tensor], size: tuple[int, int], count: int) -> EndToEnd:
    """Time `count` images once the workers are busy, and check their form."""
    for _ in range(4):
        batch = next(batches)
    assert batch.shape == (BATCH_SIZE, 3, *size)
    main, workers, clock = time.process_time(), children_seconds(), time.perf_counter()
    for _ in range(count // BATCH_SIZE):
        next(batches)
    return EndToEnd(
        main=1000 * (time.process_time() - main) / count,
        workers=1000 * (children_seconds() - workers) / count,
        rate=count / (time.perf_counter() - clock),
    )


def children_seconds() -> float:
    """Return the CPU seconds of the running child processes, those of the system's file for each."""
    total, ticks = 0, os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            total += int(fields[11]) + int(fields[12])
    return total / ticks


def measure_runs(tar: Path, workers: Sequence[int], count: int, rounds: int) -> Runs:
    """Interleave whole runs of both paths, to each size and with each number of workers."""
    found: dict[tuple[str, tuple[int, int], int], list[EndToEnd]] = {}
    for _ in range(rounds):
        for size in SIZES:
            for number in workers:
                for name, run in (("original", run_original), ("ours", run_ours)):
                    found.setdefault((name, size, number), []).append(run(tar, size, number, count))
    return found


def _no_draw(purpose: str) -> torch.Generator:
    raise AssertionError(f"nothing is drawn here, least of all {purpose}")


def main() -> int:
    """Measure, print the page, write it if told, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the page is written")
    parser.add_argument("--pictures", type=int, default=4, help="different pictures of each quality")
    parser.add_argument("--rounds", type=int, default=5, help="times that each measurement is repeated")
    parser.add_argument("--count", type=int, default=96, help="images of one whole run")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    pictures = [picture(WIDTH, HEIGHT, seed) for seed in range(args.pictures)]
    files = [(quality, jpeg(image, quality)) for image in pictures for quality in QUALITIES]
    images = [row for size in SIZES for row in measure_images(files, size, args.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        tar = write_set(Path(folder), [file for _, file in files], args.count)
        found = measure_runs(tar, args.workers, args.count, args.rounds)
    load = f"Load of the machine before and after: {before:.1f}, {os.getloadavg()[0]:.1f}."
    text = page(f"python bench/data.py {' '.join(sys.argv[1:])}".strip(), images, found, load)
    print(text)
    if args.out is not None:
        args.out.write_text(text)
    return 0 if all(met for _, met in verdicts(images, found)) else 1


if __name__ == "__main__":
    sys.exit(main())
