"""Two ranks of a run as forks of this process, watched step by step, and killed at a chosen moment.

What is made of their ends and notes is decided in `soak`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import torch

from cascade_train.__main__ import launch
from cascade_train.engine.loop import Trainer

RANKS = 2
SMALL_NETWORK = (
    *("model=c_tiny", "model.weights=null", "model.image_size=32", "model.text_encoder.num_hidden_layers=1"),
    *("model.network.block_out_channels=[32,32]", "model.network.num_attention_heads=[1,1]"),
    *("model.network.down_num_layers_per_block=[1,1]", "model.network.up_num_layers_per_block=[1,1]"),
)
"""The architecture at the smallest size, so that a step costs little beside what surrounds it."""

IMPORTED_ONCE = (
    *("cascade_train.assembly.run", "cascade_train.data.shapes", "cascade_train.models.cascade.stage_c"),
    *(
        "cascade_train.models.text_encoder",
        "cascade_train.models.cascade.convolutional",
        "cascade_train.tasks.finetune",
    ),
)
"""What forks find, so that a start costs no seconds of importing."""

END_SECONDS = 120.0
"""How long what is left of a run has to end by itself, on a busy machine too."""

LAST_STEPS = 10
"""In which nobody is killed, lest the run has ended before."""

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When ranks are killed, and which.

    Attributes:
        ranks: the victims.
        step: the step in which; None = while the ranks start.
        delay: after the beginning of that step, in steps as long as the one before; while the ranks start, in seconds.
    """

    ranks: tuple[int, ...]
    step: int | None
    delay: float


@dataclass(frozen=True, kw_only=True)
class End:
    """How one start ended.

    Attributes:
        codes: of the ranks; minus a signal's number where one ended it.
        orphans: processes that were left behind and had to be ended.
        hung: ranks that had to be ended.
        seconds: by the clock, from the fork to the last end.
    """

    codes: tuple[int, ...]
    orphans: int
    hung: tuple[int, ...]
    seconds: float


class Ranks:
    """The ranks of one start; their steps are seen through shared memory, what they say is in `<notes>/said_<rank>`."""

    def __init__(self, arguments: Sequence[str], notes: Path, *, memory_every_steps: int) -> None:
        """Fork them.

        Args:
            arguments: of the training command.
            notes: a folder, made if it is missing.
            memory_every_steps: how often each rank notes its memory in `<notes>/memory_<rank>.jsonl`.
        """
        notes.mkdir(parents=True, exist_ok=True)
        for module in IMPORTED_ONCE:
            importlib.import_module(module)
        adopt_orphans()
        self._steps = mmap(-1, 8 * RANKS)
        self._begun, port = time.monotonic(), free_port()
        self._codes: dict[int, int] = {}
        self._processes: list[int] = []
        for rank in range(RANKS):
            process = os.fork()
            if process == 0:
                self._be(rank, port, arguments, notes, memory_every_steps)
            self._processes.append(process)

    def kill(self, kill: Kill) -> None:
        """Kill at the chosen moment, or not at all where the run ends before."""
        time.sleep(kill.delay if kill.step is None else kill.delay * self._reach(kill.step))
        for rank in kill.ranks:
            if rank not in self._codes:
                os.kill(self._processes[rank], signal.SIGKILL)

    def _reach(self, step: int) -> float:
        """Wait for a step to begin, or for an end, and return how many seconds the step before took."""
        seen, begun, seconds = 0, time.monotonic(), 0.0
        while seen < step and not self._codes:
            time.sleep(0.002)
            self._collect()
            if self.step() != seen:
                seen, now = self.step(), time.monotonic()
                begun, seconds = now, now - begun
        return seconds

    def step(self) -> int:
        """Return the latest step that any rank has begun in this start; 0 = none."""
        return max(struct.unpack(f"{RANKS}q", self._steps[:]))

    def end(self, *, within_seconds: float | None = None) -> End:
        """Wait for the ranks to end, and for what they may have left behind.

        Args:
            within_seconds: after which ranks that are left are ended; None = however long they take.
        """
        deadline = None if within_seconds is None else time.monotonic() + within_seconds
        while len(self._codes) < RANKS and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.01)
            self._collect()
        hung = tuple(rank for rank in range(RANKS) if rank not in self._codes)
        for rank in hung:
            os.kill(self._processes[rank], signal.SIGKILL)
            self._codes[rank] = os.waitstatus_to_exitcode(os.waitpid(self._processes[rank], 0)[1])
        seconds = time.monotonic() - self._begun
        codes = tuple(self._codes[rank] for rank in range(RANKS))
        return End(codes=codes, orphans=end_orphans(), hung=hung, seconds=seconds)

    def _collect(self) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._codes:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    self._codes[rank] = os.waitstatus_to_exitcode(status)

    def _be(self, rank: int, port: int, arguments: Sequence[str], notes: Path, every_steps: int) -> None:
        """Be a rank, and end with its exit code, whatever happens."""
        code = 99
        try:
            with (notes / f"said_{rank}").open("ab") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            torch.set_num_threads(1)
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
            note_steps(self._steps, rank, notes / f"memory_{rank}.jsonl", every_steps)
            code = launch(list(arguments))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def note_steps(steps: mmap, rank: int, memory: Path, every_steps: int) -> None:
    """Let this process note each step that it begins, and at fixed steps what it holds."""
    train_step = Trainer.train_step

    def noting(self: Trainer, micro_batches: Any) -> Any:
        struct.pack_into("q", steps, 8 * rank, self.step + 1)
        if self.step % every_steps == 0:
            with memory.open("a") as file:
                file.write(json.dumps({"step": self.step, **holdings()}) + "\n")
        return train_step(self, micro_batches)

    Trainer.train_step = noting  # type: ignore[method-assign]


def holdings() -> dict[str, float]:
    """Return the resident memory of this process in MiB, its open files and its threads."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "mib": int(fields["VmRSS"].split()[0]) / 1024,
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(fields["Threads"]),
    }


def adopt_orphans() -> None:
    """Become the parent of processes whose parents die, so that none is overlooked."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def end_orphans(seconds: float = 30.0) -> int:
    """Wait for processes that dead ranks left to end by themselves; kill the others and return how many there were."""
    deadline = time.monotonic() + seconds
    left: set[int] = set()
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return len(left)
        if not ended and time.monotonic() > deadline:
            left |= set(children())
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def children() -> list[int]:
    """Return the processes whose parent this one is."""
    return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def moments(*, steps: int, every_steps: int, seed: int) -> Iterator[Kill]:
    """Yield one kill for every `every_steps` steps, at random moments, in order.

    Victims are one rank or, as when a machine fails, both. Every fifth kill meets both while they start.

    Args:
        steps: of the whole run.
        every_steps: on average between kills; each lies in a stretch of its own.
        seed: of the draws.
    """
    drawn = random.Random(seed)
    for number in range(steps // every_steps):
        if number % 5 == 4:
            yield Kill(ranks=(0, 1), step=None, delay=drawn.uniform(0.0, 3.0))
        else:
            first = number * every_steps
            step = drawn.randrange(first + 2, min(first + every_steps, steps - LAST_STEPS))
            yield Kill(ranks=drawn.choice([(0,), (1,), (0, 1)]), step=step, delay=drawn.uniform(0.0, 1.5))
