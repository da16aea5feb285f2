"""Damage small files of data and weights at random, and count how their readers end.

    python bench/fuzz_data.py --minutes 10 --out bench/results/fuzz_data.md

Each case is one file, changed by a seed of its own and read in a process of its own with limits of time and memory. It
has to be read, or to end in a sentence. Ends with 1 where a case ended in a traceback, took too long or too much.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image
from safetensors.torch import save

from cascade_train.data.index.cache import read_cache
from cascade_train.data.index.selection import read_quarantine
from cascade_train.data.parquet import Parquet
from cascade_train.data.prompts import read_prompts
from cascade_train.data.source import Source
from cascade_train.data.table import Table
from cascade_train.data.webdataset import WebDataset
from cascade_train.errors import ConfigError, RunError
from cascade_train.models.cascade.family import CASCADE
from cascade_train.models.formats.lora_files import holds_lora, read_lora
from cascade_train.models.formats.weights import open_weights
from cascade_train.models.formats.weights_source import find_pipeline, find_weight_files

GIB, SECONDS = 2**30, 10
ENDS = ("read", "sentence", "traceback", "hang", "memory")
SOURCE = {
    "image_size": 16, "crop": "center", "shuffle_window_shards": 2, "num_workers": 0, "worker_start": "fork",
    "index_dir": None, "row_filters": None,
}  # fmt: skip
TABLE = {**SOURCE, "image_column": "image", "caption_column": "text", "root": None}
PARQUET = {**TABLE, "width_column": "width", "height_column": "height"}
MODULES = {f"down.0.attention.to_{name}": (8, 8) for name in ("q", "k", "v", "out.0")}
NUMBERS = (0, 1, -1, 127, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
WORDS = (b"null", b"[]", b"{}", b"-1", b"1e309", b"NaN", b'"', b"\\", b"\0", b"\xff", b"[" * 2000, b"9" * 5000)


def picture() -> bytes:
    """Return a small picture, encoded."""
    file = io.BytesIO()
    Image.new("RGB", (20, 24), (200, 60, 30)).save(file, format="png")
    return file.getvalue()


PICTURE = picture()


def tar(kind: int) -> bytes:
    """Return a tar of three samples, one of them with a long name."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
        for number in range(3):
            name = f"{'long' * 40}/é{number}" if number == 1 else f"{number}"
            for end, content in (("png", PICTURE), ("txt", b"a cat"), ("json", b'{"score": 3}')):
                info = tarfile.TarInfo(f"{name}.{end}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def parquet() -> bytes:
    """Return two row groups with pictures and their sizes."""
    file = io.BytesIO()
    image = {"bytes": PICTURE, "path": "a.png"}
    rows = [{"image": image, "text": f"a cat {n}", "width": 20, "height": 24.0, "score": n} for n in range(6)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=3)
    return file.getvalue()


def pickled(*, zipped: bool) -> bytes:
    """Return what torch saves, as a zip or as it did before."""
    file = io.BytesIO()
    state = {"a.weight": torch.ones(4, 3), "a.bias": torch.zeros(4)}
    torch.save({"state_dict": state}, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def lora(form: str) -> bytes:
    """Return adapters of `MODULES` as ours, kohya's or the original's."""
    tensors: dict[str, torch.Tensor] = {}
    header = {"format": "cascade_train.lora/1", "rank": "2", "alpha": "2", "base_size": "", "dora": "false"}
    for number, name in enumerate(MODULES):
        ends = (".lora_A.weight", ".lora_B.weight") if form == "ours" else (".lora_down.weight", ".lora_up.weight")
        name = name if form == "ours" else f"lora_unet_{name.replace('.', '_')}"
        stem = f"weights.{number}" if form == "original" else name
        ends = (".lora_down", ".lora_up") if form == "original" else ends
        tensors |= {stem + ends[0]: torch.ones(2, 8), stem + ends[1]: torch.ones(8, 2)}
        if form == "kohya":
            tensors[f"{stem}.alpha"] = torch.tensor(2.0)
    return save(tensors, header | {"targets": json.dumps(list(MODULES))} if form == "ours" else None)


def cache() -> bytes:
    """Return an archive of arrays."""
    file = io.BytesIO()
    np.savez(file, table=np.zeros(3, dtype=[("a", "<i4"), ("b", "<i8")]), keys=np.array([b"a", b"bc", b"d"]))
    return file.getvalue()


def from_source(make: Callable[[Path], Source]) -> Callable[[Path], Any]:
    """Return what opens the source that `make` makes of a file, and reads its first rows."""

    def read(path: Path) -> None:
        source = make(path)
        source.check()
        for row in range(min(3, len(source.open()))):
            source.read(row)

    return read


def tensors_of(path: Path) -> None:
    """Read all tensors of a file."""
    with open_weights(str(path)) as tensors:
        for name in tensors.shapes():
            tensors.read(name).sum()


def adapters_of(path: Path) -> None:
    """Read the adapters of a file."""
    if holds_lora(str(path)):
        read_lora(str(path), key="from", family=CASCADE, modules=MODULES)


INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
PIPELINE = json.dumps(
    {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
).encode()
READERS: Mapping[str, tuple[str, bytes, Callable[[Path], Any]]] = {
    "tar, pax": ("a.tar", tar(tarfile.PAX_FORMAT), from_source(lambda path: WebDataset(urls=str(path), **SOURCE))),
    "tar, gnu": ("a.tar", tar(tarfile.GNU_FORMAT), from_source(lambda path: WebDataset(urls=str(path), **SOURCE))),
    "parquet": ("a.parquet", parquet(), from_source(lambda path: Parquet(path=str(path), **PARQUET))),
    "csv": (
        "a.csv",
        b'image,text\na.png,"a cat"\na.png,b\n' * 3,
        from_source(lambda path: Table(path=str(path), mask_column=None, **TABLE)),
    ),
    "jsonl": (
        "a.jsonl",
        b'{"image": "a.png", "text": ["a cat", "b"], "score": 3}\n' * 4,
        from_source(lambda path: Table(path=str(path), mask_column=None, **TABLE)),
    ),
    "prompts": ("a.jsonl", b'{"caption": "a cat", "n": 1}\n' * 3, lambda path: read_prompts(f"@{path}")),
    "quarantine": ("a.jsonl", b'{"sample": "train.tar:0001"}\n' * 3, read_quarantine),
    "cached index": ("a.npz", cache(), read_cache),
    "safetensors": ("a.safetensors", save({"a": torch.ones(4, 3), "b": torch.ones(2)}, {"k": "v"}), tensors_of),
    "ckpt, zip": ("a.ckpt", pickled(zipped=True), tensors_of),
    "ckpt, older": ("a.ckpt", pickled(zipped=False), tensors_of),
    "LoRA, ours": ("a.safetensors", lora("ours"), adapters_of),
    "LoRA, kohya": ("a.safetensors", lora("kohya"), adapters_of),
    "LoRA, original": ("a.safetensors", lora("original"), adapters_of),
    "index of shards": ("model.safetensors.index.json", INDEX, lambda path: find_weight_files(str(path.parent))),
    "model_index.json": ("model_index.json", PIPELINE, lambda path: find_pipeline(str(path.parent))),
}
"""What is read -> a file's name, its content, and what reads it."""


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return a content with some bytes changed, taken out or put in; sums of tars' headers are made right mostly."""
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        near = chance.choice((64, 600, len(found)))  # headers come first, directories and footers last
        place = chance.randrange(max(1, min(near, len(found))))
        place = max(0, len(found) - 1 - place) if chance.random() < 0.3 else place
        _change(found, place, chance)
    if content[257:262] == b"ustar" and chance.random() < 0.8:
        _right_sums(found)
    return bytes(found)


def _change(found: bytearray, place: int, chance: random.Random) -> None:
    length = chance.choice((1, 2, 8, 64))
    match chance.randrange(7):
        case 0:
            found[place : place + 1] = bytes([chance.randrange(256)])
        case 1:
            number = chance.choice(NUMBERS) & (2**64 - 1)
            width = chance.choice((4, 8))
            found[place : place + width] = number.to_bytes(8, chance.choice(("little", "big")))[:width]
        case 2:
            word = chance.choice(WORDS)
            found[place : place + chance.choice((0, len(word)))] = word
        case 3:
            del found[place : place + length]
        case 4:
            found[place:place] = found[place : place + length] * chance.choice((1, 1, 50))
        case 5:
            del found[place:]
        case _:
            digit = [number for number, value in enumerate(found[:4096]) if 48 <= value < 58]
            if digit:
                found[chance.choice(digit)] = 48 + chance.randrange(10)


def _right_sums(found: bytearray) -> None:
    for start in range(0, len(found) - 511, 512):
        if found[start + 257 : start + 262] == b"ustar":
            found[start + 148 : start + 156] = b" " * 8
            found[start + 148 : start + 156] = b"%06o\0 " % sum(found[start : start + 512])


def end_of(read: Callable[[Path], Any], path: Path) -> tuple[str, str]:
    """Return how reading a file in a process of its own ended, one of `ENDS`, and what it says."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _read_and_tell(read, path, writes)
    os.close(writes)
    try:
        if not select.select([reads], [], [], SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
            return "hang", f"more than {SECONDS} s"
        end, _, text = os.read(reads, 2**16).decode(errors="replace").partition("\n")
        return end or "traceback", text or "the process died"
    finally:
        os.waitpid(child, 0)
        os.close(reads)


def _read_and_tell(read: Callable[[Path], Any], path: Path, writes: int) -> None:
    end, text, before = "read", "", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    private = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (private + 4 * GIB,) * 2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        read(path)
    except (ConfigError, RunError) as error:
        end, text = "sentence", str(error)
    except BaseException as error:
        end, text = "traceback", f"{type(error).__name__}: {error}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    end = "memory" if grown * 1024 > GIB else end
    os.write(writes, f"{end}\n{text[:300]}".encode())
    os._exit(0)


def cases(seed: int, minutes: float) -> Iterator[tuple[str, int]]:
    """Yield a reader and a seed, in turns, until the time is over."""
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        yield from ((name, seed) for name in READERS)
        seed += 1


def fuzz(seed: int, minutes: float) -> tuple[Counter[tuple[str, str]], dict[str, str]]:
    """Return how many cases of each reader ended how, and the first of each kind that is a fault."""
    counts: Counter[tuple[str, str]] = Counter()
    faults: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, number in cases(seed, minutes):
            file, content, read = READERS[name]
            place = Path(folder) / f"{number}"
            place.mkdir(exist_ok=True)
            (place / "a.png").write_bytes(PICTURE)
            (place / file).write_bytes(damaged(content, random.Random(f"{name} {number}")))
            end, text = end_of(read, place / file)
            counts[name, end] += 1
            if end in ENDS[2:]:
                faults.setdefault(f"{name}, {end}, {text[:60]}", f"seed {number}: {text}")
            remove(place)
    return counts, faults


def remove(place: Path) -> None:
    """Remove a case's folder and what readers keep beside it."""
    for path in sorted(place.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    place.rmdir()


def table(counts: Counter[tuple[str, str]]) -> str:
    """Return the counts as a table."""
    rows = [f"| file | cases | {' | '.join(ENDS)} |", "|---" * (2 + len(ENDS)) + "|"]
    for name in (*READERS, "all"):
        found = [sum(n for (of, each), n in counts.items() if each == end and name in (of, "all")) for end in ENDS]
        rows.append(f"| {name} | {sum(found)} | {' | '.join(map(str, found))} |")
    return "\n".join(rows)


def main() -> int:
    """Damage, read, count, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    counts, faults = fuzz(args.seed, args.minutes)
    text = f"""# Damaged files of data and weights

`python bench/fuzz_data.py --minutes {args.minutes:g} --seed {args.seed}` at {commit}, {datetime.now(UTC):%Y-%m-%d}.

Each case is one file with a few bytes changed, read in a process of its own. A hang is more than {SECONDS} s,
memory more than 1 GiB above what the process began with.

{table(counts)}
"""
    if faults:
        text += "\nFirst of each fault:\n\n" + "".join(f"- {kind}: {what!r}\n" for kind, what in faults.items())
    print(text) if args.out is None else args.out.write_text(text)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
