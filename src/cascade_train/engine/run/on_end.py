"""A command of the user's that is run once when a run has finished, stopped or failed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from cascade_train.engine.loop import Trainer
from cascade_train.redaction import logged
from cascade_train.signals import handling

log = logging.getLogger(__name__)

SECONDS = 20.0
"""How long the command may take: less than the 30 s after which torchrun and SLURM kill what they asked to end."""

_RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
_LAUNCHERS = ("TORCHELASTIC", "SLURM_STEP_")
"""Variables, and beginnings of others, that would make a rank of another start of ours."""


@contextmanager
def run_end_hook(command: str | None, trainer: Trainer, directory: Path) -> Iterator[None]:
    """Run `command`, None = nothing, on rank 0 after the block, also after an error. Not collective."""
    command = command if trainer.world.is_main else None
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        run_command(command, "failed", directory, trainer.step, str(error) or type(error).__name__)
        raise
    event = "finished" if trainer.stopped is None else "stopped"
    run_command(command, event, directory, trainer.step, trainer.stopped or f"Finished at step {trainer.step}.")


def run_command(command: str | None, event: str, directory: Path, step: int, message: str) -> None:
    """Run a shell command with the outcome in its environment; its failure is logged.

    It is killed after `SECONDS` and by Ctrl-C; other signals do not reach it.
    """
    if command is None:
        return
    facts = {"EVENT": event, "RUN_DIR": str(directory), "STEP": str(step), "MESSAGE": logged(message)}
    environment = {key: value for key, value in os.environ.items() if not (key in _RANKS or key.startswith(_LAUNCHERS))}
    environment |= {f"CASCADE_TRAIN_{key}": value for key, value in facts.items()}
    started: list[subprocess.Popen[bytes]] = []

    def end(number: int = signal.SIGINT, _: FrameType | None = None) -> None:
        if number == signal.SIGINT and started:
            with suppress(ProcessLookupError):
                os.killpg(started[0].pid, signal.SIGKILL)

    with handling(end):
        try:
            shell, nothing = ["sh", "-c", command], subprocess.DEVNULL
            started.append(subprocess.Popen(shell, env=environment, stdin=nothing, start_new_session=True))
            if code := started[0].wait(SECONDS):
                log.warning("The command of run.on_end ended with exit code %d.", code)
        except subprocess.TimeoutExpired:
            end()
            started[0].wait()
            log.warning("The command of run.on_end was ended after %.0f s: put longer work behind a &.", SECONDS)
        except (OSError, ValueError) as error:
            log.warning("The command of run.on_end did not start: %s", error)
