"""The one command line, `cascade-train [command] …`; also `python -m cascade_train`, and under torchrun.

Only the way in: trainings go to config/launch.py, other commands to commands/parts/command_line.py. Imports little at
the top, because the signal handlers of a training come first.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import cascade_train
from cascade_train.errors import INTERRUPTED
from cascade_train.signals import set_handlers, stop_at_once

GC_THRESHOLD = 100_000
"""Objects allocated between garbage collections of a command: by default a fifth of its start is spent on them."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 refused, 75 stopped, 130 interrupted."""
    if not sys.flags.safe_path and not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))  # modules of a user's own, which `python -m` finds without this
    if not is_training(sys.argv[1:]):
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="replace")
        gc.set_threshold(GC_THRESHOLD)
        try:
            leave(launch(sys.argv[1:]))
        except KeyboardInterrupt:  # while it imports; later, run_command reports it
            sys.stderr.write("Interrupted.\n")
            leave(INTERRUPTED)
    set_handlers(stop_at_once)
    harden_output()
    gc.disable()  # assembly.run enables it
    code = launch(sys.argv[1:])
    set_handlers(lambda *_: os._exit(code))  # the run has ended: no signal changes its exit code any more
    gc.unfreeze()  # else libraries report what they could not free
    gc.disable()  # Python collects twice more as it exits, whether or not this is enabled
    leave(code)


class DroppedOutput(io.FileIO):
    """A file whose failed writes are dropped: those to a closed terminal or pipe, or to a full disk."""

    def write(self, data: Any) -> int:
        """Write, and count all as written where that fails."""
        with suppress(OSError):
            if (count := super().write(data)) is not None:
                return count
        return len(data)


def harden_output() -> None:
    """Let no output end this process: what cannot be written is dropped, what cannot be encoded replaced."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:  # a closed one: a file of the run would take its number
        pass
    os.close(spare)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        encoding, errors = getattr(stream, "encoding", "utf-8"), getattr(stream, "errors", "strict")
        raw = io.BufferedWriter(DroppedOutput(number, "w", closefd=False))
        errors = "replace" if errors == "strict" else errors
        setattr(sys, name, io.TextIOWrapper(raw, encoding, errors, line_buffering=True))


def leave(code: int) -> NoReturn:
    """End this process; at once where an error left it in a group of GPUs, whose destructor waits for other ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def is_training(argv: Sequence[str]) -> bool:
    """Return whether arguments are a training's: they begin with `train`, key=value or an option of Hydra."""
    first = argv[0] if argv else ""
    return first in ("", "train") or "=" in first or first.startswith(("-", "~"))


def launch(argv: Sequence[str]) -> int:
    """Run `argv` in this process, without signal handlers of its own, and return the exit code."""
    if "--version" in argv:
        sys.stdout.write(f"cascade-train {cascade_train.__version__}\n")
        return 0
    if is_training(argv):
        from cascade_train.commands.train import train
        from cascade_train.config.launch import compose_and_run

        return compose_and_run(argv[1:] if argv[:1] == ["train"] else argv, train)
    from cascade_train.commands.parts.command_line import run_command

    return run_command(argv)


if __name__ == "__main__":
    main()
