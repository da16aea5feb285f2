"""Training that is killed again and again, beside the same training left alone.

    make soak STEPS=2000 KILL_EVERY=100 PASSES=20
    python bench/soak.py --steps 200 --kill-every 100

Two ranks train to the end undisturbed, their memory noted. Two ranks train the same with a kill at a random moment
about every `--kill-every` steps, started again by the same command. Both must end with the same bits: exported
weights, last checkpoint, metrics of every step. Then the tests of several ranks pass `--passes` times. Parts that
are done are kept in `--folder`, and a start after an interruption goes on with the next one. Ends with 1 where
anything is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

from bench.soak_ranks import END_SECONDS, RANKS, SMALL_NETWORK, End, Kill, Ranks, moments
from bench.soak_report import differences, growth, page, verdicts

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT_EVERY = 5
MEMORY_SAMPLES = 40
"""How often the undisturbed ranks note their memory."""


def arguments(run: Path, steps: int) -> list[str]:
    """Return the training command's arguments: saves are frequent and beside the loop, data comes from workers."""
    return [
        *SMALL_NETWORK,
        *("task=finetune", "train.global_batch_size=4", "ema.decay=0.99", "data.num_workers=1"),
        *("log.every_steps=5", f"checkpoint.every_steps={CHECKPOINT_EVERY}", "sample.every_steps=null"),
        *(f"train.max_steps={steps}", f"run.dir={run}"),
    ]


def train_undisturbed(folder: Path, steps: int) -> dict[str, Any]:
    """Train to the end and return the seconds, and what the memory of each rank did."""
    run, notes = fresh(folder, "undisturbed")
    end = Ranks(arguments(run, steps), notes, memory_every_steps=max(1, steps // MEMORY_SAMPLES)).end()
    expect(end, (0,) * RANKS, notes)
    rows = [read_lines(notes / f"memory_{rank}.jsonl") for rank in range(RANKS)]
    return {"seconds": end.seconds, "memory": [growth(each, steps) for each in rows]}


def train_disturbed(folder: Path, kills: Sequence[Kill], steps: int) -> dict[str, Any]:
    """Train to the end through all kills and return how often ranks were killed, in which steps."""
    run, notes = fresh(folder, "disturbed")
    command = arguments(run, steps)
    began, killed = time.monotonic(), []
    for number, kill in enumerate(kills):
        ranks = Ranks(command, notes / str(number), memory_every_steps=steps)
        ranks.kill(kill)
        at = ranks.step()
        survivors = tuple(-9 if rank in kill.ranks else 1 for rank in range(RANKS))
        expect(ranks.end(within_seconds=END_SECONDS), survivors, notes / str(number))
        killed.append({"ranks": kill.ranks, "step": at})
    last = Ranks(command, notes / "last", memory_every_steps=steps)
    expect(last.end(), (0,) * RANKS, notes / "last")
    return {"seconds": time.monotonic() - began, "kills": killed}


def fresh(folder: Path, name: str) -> tuple[Path, Path]:
    """Return where a run and its notes lie, without those of an interrupted soak."""
    places = folder / name, folder / f"{name}_notes"
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    return places


def expect(end: End, codes: tuple[int, ...], notes: Path) -> None:
    """End the soak where ranks ended otherwise than they must, with what they said.

    Raises:
        SystemExit: they did.
    """
    said = "\n".join(file.read_text() for file in sorted(notes.glob("said_*")))
    if end.codes != codes or end.hung or end.orphans or "Traceback" in said:
        sys.exit(f"{end} instead of {codes}, or a traceback, in {notes}:\n{said[-4000:]}")


def pass_tests() -> dict[str, Any]:
    """Run the tests of several ranks once, two files at a time, and return how it went.

    Slow is what repeats something itself: this soak in small. What killed and hindered ranks do is left out, since that
    is what the soak itself repeats.
    """
    chosen = ["tests/distributed", "-m", "distributed and not slow", "--ignore=tests/distributed/test_faults.py"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", *chosen]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return {"code": done.returncode, "said": lines[-1] if lines else "", "seconds": time.monotonic() - began}


def read_lines(file: Path) -> list[dict[str, float]]:
    """Return the JSON objects of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def commit() -> str:
    """Return the commit of the checkout, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


class Parts:
    """What of a soak is done, in a file, so that an interrupted one goes on; another commit or size starts anew."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        """Read what is there of these settings."""
        found = json.loads(file.read_text()) if file.exists() else {}
        self._file = file
        self.done: dict[str, Any] = found if found.get("settings") == settings else {"settings": settings, "passes": []}

    def keep(self) -> None:
        """Write it down."""
        self._file.write_text(json.dumps(self.done, indent=2) + "\n")

    def do(self, name: str, work: Callable[[], Any]) -> Any:
        """Return what a part found, now or before."""
        if name not in self.done:
            self.done[name] = work()
            self.keep()
        return self.done[name]


def train_both(parts: Parts, folder: Path, args: argparse.Namespace) -> None:
    """Train undisturbed and disturbed, and compare."""
    parts.do("undisturbed", lambda: train_undisturbed(folder, args.steps))
    kills = list(moments(steps=args.steps, every_steps=args.kill_every, seed=args.seed))
    parts.do("disturbed", lambda: train_disturbed(folder, kills, args.steps))
    parts.do("differences", lambda: differences(folder / "undisturbed", folder / "disturbed", args.steps))


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, print the page, write it if told, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="of each of the two trainings")
    parser.add_argument("--kill-every", type=int, default=100, help="steps between kills, on average")
    parser.add_argument("--passes", type=int, default=0, help="of the tests of several ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "soak", help="where runs and finished parts lie")
    parser.add_argument("--out", type=Path, help="where the page is written")
    args = parser.parse_args(argv)
    settings = {"commit": commit(), "steps": args.steps, "kill_every": args.kill_every, "seed": args.seed}
    args.folder.mkdir(parents=True, exist_ok=True)
    parts = Parts(args.folder / "soak.json", settings)
    train_both(parts, args.folder, args)
    while len(parts.done["passes"]) < args.passes:
        parts.done["passes"].append(pass_tests())
        parts.keep()
        print(f"pass {len(parts.done['passes'])}: {parts.done['passes'][-1]}", flush=True)
    text = page(parts.done, args.passes)
    print(text)
    if args.out is not None:
        args.out.write_text(text)
    return 0 if all(met for _, met in verdicts(parts.done, args.passes)) else 1


if __name__ == "__main__":
    sys.exit(main())
