"""Damage one file of a run at a time, let a command read it, and count tracebacks, hangs and processes over 1 GB.

    python bench/fuzz_readers.py --seconds 600 --out bench/results/fuzz_readers.md
    python bench/fuzz_readers.py --case 17

Works on a copy of the runs that tests/frozen holds, in a temporary folder, without the network. Each case is drawn from
the seed and its number alone: a command, a file that it reads, and the damage. The command runs in a process of its
own, as a user types it, and must end by itself with a sentence. `--case` repeats one and shows what it prints. Ends
with 1 where a case failed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` and `tests` are packages of this checkout

from bench.fuzz_mutations import mutated
from cascade_train.__main__ import launch
from tests.frozen import frozen_set

ROOT = Path(__file__).resolve().parents[1]
HANG_SECONDS = 10.0
"""Beyond what the command takes on files that are whole."""
MOST_BYTES = 1 << 30
"""Resident in a process, torch and what it imports among them."""
MOST_OUTPUT = 100_000
"""Characters of what a command prints: more is a flood, of a message that quotes a whole file."""
POLL_SECONDS = 0.02
SMALL_BYTES = 1 << 19
"""Files of more are weights."""
KINDS = ("traceback", "hang", "memory", "no sentence", "flood", "killed")
REFUSALS = (0, 1, 2)
RECIPE = {
    "pretrained_model_name_or_path": "model.safetensors",
    "train_batch_size": 4,
    "learning_rate": 1e-4,
    "optimizer_args": ["weight_decay=0.01"],
    "network_module": "networks.lora",
    "network_dim": 8,
    "network_args": ["conv_dim=4"],
    "train_data_dir": "data",
    "resolution": "512,512",
    "sample_prompts": "prompts.txt",
}
"""Of sd-scripts."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A command, and the folder whose files it may read."""

    argv: tuple[str, ...]
    folder: str


@dataclass(frozen=True, kw_only=True)
class End:
    """How a command ended: its exit code (None: it was ended here), seconds, peak bytes, and what it printed."""

    code: int | None
    seconds: float
    peak: int
    output: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """One damaged file: the command, the file, the damage, and how it failed (None: it did not)."""

    number: int
    command: str
    file: str
    damage: str
    failure: str | None
    where: str


def readers(commands: dict[str, Any]) -> dict[str, Reader]:
    """Return what is tried, by name."""
    run, sweep = "c_finetune", "multirun/rates"
    told = {
        "checkpoints ls": (run, "checkpoints ls c_finetune"),
        "checkpoints verify": (run, "checkpoints verify c_finetune"),
        "checkpoints prune": (run, "checkpoints prune c_finetune keep_last=1"),
        "checkpoints promote": (run, "checkpoints promote c_finetune step_4 name=good"),
        "compare": (run, "compare c_finetune c_finetune"),
        "report": (run, "report c_finetune out=page.html"),
        "report of a sweep": (sweep, "report multirun/rates out=page.html"),
        "export": (run, "export from=c_finetune out=again"),
        "generate": (run, "generate from=c_finetune prompts=[red] steps=1 out=pictures"),
        "merge": ("c_lora", "merge from=base/c lora=c_lora out=merged"),
        "recipe import": ("recipe", "recipe import recipe/lora.toml out=mine/experiment/lora.yaml"),
        "recipe import, JSON": ("recipe", "recipe import recipe/lora.json out=mine/experiment/lora.yaml"),
    }
    found = {name: Reader(argv=tuple(line.split()), folder=folder) for name, (folder, line) in told.items()}
    resume = (*commands["runs"][run], "train.max_steps=5")
    return {
        **found,
        "evaluate": Reader(argv=tuple(commands["evaluation"]), folder=run),
        "resume": Reader(argv=resume, folder=run),
        "resume of a sweep": Reader(argv=tuple(commands["sweep"]), folder=sweep),
    }


def prepare(folder: Path) -> tuple[Path, Path, dict[str, Reader]]:
    """Return a whole set with today's files beside the frozen ones, where its damaged copies lie, and the commands."""
    whole, damaged = folder / "whole", folder / "set"
    commands = frozen_set.copy_as_if_made_there(frozen_set.unpack(folder / "unpacked"), damaged)
    for name in commands["runs"]:
        if name not in ("c_finetune", "c_lora"):
            shutil.rmtree(damaged / name)
    os.chdir(damaged)
    frozen_set.stopped(Path("c_finetune"))
    Path("recipe").mkdir()
    Path("recipe/lora.json").write_text(json.dumps(RECIPE))
    Path("recipe/lora.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in RECIPE.items()))
    loaded = folder / "modules.txt"
    for argv in (
        [*commands["runs"]["c_finetune"], "log.every_steps=1"],
        ["export", "from=c_lora"],
        commands["evaluation"],
    ):
        end = run(argv, folder / "output.txt", seconds=120, modules=loaded)
        if end.code != 0:
            raise RuntimeError(f"The set could not be prepared: {' '.join(argv)}\n{end.output}")
        for name in loaded.read_text().split():  # once here, not in each process
            with suppress(Exception):
                importlib.import_module(name)
    rolled_back = {"step": 3, "keys": ["a/0"], "reason": "loss"}
    for name in ("rolled_back.jsonl", "unreadable.jsonl"):
        Path("c_finetune", name).write_text(json.dumps({**rolled_back, "sample": "a/0"}) + "\n")
    shutil.copytree(damaged, whole)
    return whole, damaged, readers(commands)


def run(argv: list[str] | tuple[str, ...], output: Path, *, seconds: float, modules: Path | None = None) -> End:
    """Run a command in a process of its own until it ends, hangs or takes too much memory."""
    began, process = time.monotonic(), os.fork()
    if process == 0:
        _be_the_command(argv, output, modules)
    peak, status = 0, None
    while status is None and time.monotonic() - began < seconds and peak <= MOST_BYTES:
        time.sleep(POLL_SECONDS)
        peak = max(peak, _resident(process))
        ended, code = os.waitpid(process, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    with output.open(errors="replace") as printed:
        text = printed.read(MOST_OUTPUT + 1)
    return End(code=status, seconds=time.monotonic() - began, peak=peak, output=text)


def _be_the_command(argv: list[str] | tuple[str, ...], output: Path, modules: Path | None) -> None:
    """Never return."""
    code = 99
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))  # a copy of 20 GB is not waited for
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(written, 1)
        os.dup2(written, 2)
        code = launch(list(argv))
        if modules is not None:
            modules.write_text("\n".join(sys.modules))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _resident(process: int) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def failure_of(end: End) -> str | None:
    """Return how a command failed, one of KINDS, or None."""
    if end.code is None:
        return "memory" if end.peak > MOST_BYTES else "hang"
    if "Traceback (most recent call last)" in end.output:
        return "traceback"
    if end.code not in REFUSALS:
        return "killed"
    if len(end.output) > MOST_OUTPUT:
        return "flood"
    return "no sentence" if end.code and not end.output.strip() else None


def place_of(end: End) -> str:
    """Return the last line of ours in a traceback, and the error."""
    frames = re.findall(r'cascade_train/(\S+\.py)", line (\d+), in (\S+)', end.output)
    errors = re.findall(r"^(\w[\w.]*(?:Error|Exception|Interrupt|Exit|Stop)\b.*)$", end.output, re.MULTILINE)
    place = "{}:{} {}".format(*frames[-1]) if frames else ""
    return " ".join(filter(None, (place, errors[-1][:120] if errors else "")))


def small_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are no weights, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size <= SMALL_BYTES)


def renew(whole: Path, damaged: Path) -> None:
    """Copy the whole set anew and make the copy the current folder."""
    os.chdir(whole)
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(whole, damaged)
    os.chdir(damaged)


def try_case(
    number: int, seed: int, whole: Path, damaged: Path, known: dict[str, tuple[Reader, float]]
) -> tuple[Case, End]:
    """Damage a file as the seed and the number say, run the command, and judge its end."""
    draw = Random(f"{seed} {number}")
    name = list(known)[number % len(known)]
    reader, usual = known[name]
    renew(whole, damaged)
    files = small_files(Path(reader.folder))
    if reader.folder == "recipe":
        files = [Path(reader.argv[2])]
    shallow = [path for path in files if path.suffix not in (".png", "") and "export" not in path.parts]
    file = draw.choice(shallow if draw.random() < 0.8 else files)
    damage = mutated(file, draw)
    end = run(reader.argv, whole.parent / "output.txt", seconds=usual + HANG_SECONDS)
    failure = failure_of(end)
    where = place_of(end) if failure else ""
    return Case(number=number, command=name, file=str(file), damage=damage, failure=failure, where=where), end


def timed(whole: Path, damaged: Path, tried: dict[str, Reader]) -> dict[str, tuple[Reader, float]]:
    """Run each command on the whole set, where it must succeed; return it with its seconds."""
    known = {}
    for name, reader in tried.items():
        renew(whole, damaged)
        end = run(reader.argv, whole.parent / "output.txt", seconds=120)
        if end.code != 0:
            raise RuntimeError(f"{name} fails on the whole set:\n{end.output}")
        print(f"{name}: {end.seconds:.1f} s, {end.peak >> 20} MiB", file=sys.stderr)
        known[name] = reader, end.seconds
    return known


def fuzz(numbers: Iterable[int], seconds: float, seed: int, folder: Path) -> tuple[list[Case], End | None]:
    """Try cases until the time is over; return them, and how the last command ended."""
    whole, damaged, tried = prepare(folder)
    known, cases, end = timed(whole, damaged, tried), [], None
    began = time.monotonic()
    for number in numbers:
        if time.monotonic() - began > seconds:
            break
        case, end = try_case(number, seed, whole, damaged, known)
        cases.append(case)
        if case.failure:
            print(f"{number} {case.failure}: {case.command}, {case.file}, {case.damage}: {case.where}", file=sys.stderr)
    os.chdir(ROOT)
    return cases, end


def page(cases: list[Case], seed: int, seconds: float) -> list[str]:
    """Return the result as Markdown."""
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    command = f"`python bench/fuzz_readers.py --seconds {seconds:.0f} --seed {seed}`"
    failed = [case for case in cases if case.failure]
    lines = [
        "# Damaged files",
        "",
        f"{command} at {commit.strip()}, {datetime.now(UTC):%Y-%m-%d}.",
        "",
        f"{len(cases)} cases, one damaged file each. **{len(failed)} failed.**",
        "",
        f"Hang: {HANG_SECONDS:.0f} seconds more than on whole files. Memory: more than {MOST_BYTES >> 30} GB.",
        f"Flood: prints more than {MOST_OUTPUT:,} characters. Killed: an exit code other than 0, 1 and 2.",
        "",
        "| command | cases | " + " | ".join(KINDS) + " |",
        "|---|" + "---|" * (1 + len(KINDS)),
    ]
    for name in [*dict.fromkeys(case.command for case in cases), "all"]:
        part = [case for case in cases if name in ("all", case.command)]
        counts = Counter(case.failure for case in part)
        lines.append(
            f"| {name} | " + " | ".join(str(each) for each in (len(part), *(counts[kind] for kind in KINDS))) + " |"
        )
    return lines + ["", *(f"- {count} x {each}" for each, count in _alike(failed))] if failed else lines


def _alike(failed: list[Case]) -> list[tuple[str, int]]:
    """Return each kind of failure with how often it was met, and its first case."""
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in failed:
        name = Path(case.file).name
        what = (case.where.partition(" ")[0],) if case.where else (case.command, name, case.damage)
        groups.setdefault((case.failure, *what), []).append(case)
    told = []
    for alike in sorted(groups.values(), key=len, reverse=True):
        first = alike[0]
        where = f": {first.where}" if first.where else ""
        told.append(
            (
                f"{first.failure}{where} ({first.command}, {first.file}, {first.damage}, --case {first.number})",
                len(alike),
            )
        )
    return told


def main() -> int:
    """Fuzz, show the page, and return 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no further case begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="number of the only case")
    parser.add_argument("--out", type=Path, help="file of the page; without it, it is printed alone")
    given = parser.parse_args()
    out = given.out and given.out.resolve()
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)  # a pool of threads does not outlive a fork
    with tempfile.TemporaryDirectory() as folder:
        numbers = itertools.count() if given.case is None else [given.case]
        cases, end = fuzz(numbers, given.seconds, given.seed, Path(folder).resolve())
    lines = page(cases, given.seed, given.seconds)
    print("\n".join(lines) if given.case is None or end is None else f"{cases[0]}\n{end.output}")
    if out is not None:
        out.write_text("\n".join(lines) + "\n")
    return int(any(case.failure for case in cases))


if __name__ == "__main__":
    sys.exit(main())
