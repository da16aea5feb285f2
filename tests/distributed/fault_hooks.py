"""What breaks around ranks while they train, and what is mended before the next start. Hooks of forked.py.

Runs save in steps 2 and 4, and most of it happens to the second of these checkpoints.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stopping_hooks import in_step, run_of

from cascade_train.data.tar import storage
from cascade_train.engine.checkpoint import folder as checkpoint_folder
from cascade_train.engine.checkpoint.folder import CheckpointFolder
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.checkpoint.writing import Snapshot

CAPABILITY_VERSION_3 = 0x20080522
DAC_OVERRIDE_AND_READ_SEARCH = 0b110


def die() -> None:
    """End like a process that the system kills: nothing is said, nothing is tidied up."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_worker() -> None:
    """Kill a data worker of this rank."""
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


def while_saving_step_4(call: Callable[..., Any], *, rank: int) -> Callable[..., Any]:
    """Return `call` for all but the thread that saves, when that is step 4 on a rank: it dies instead."""
    write, saved = CheckpointStore._write, []

    def writing(self: CheckpointStore, hidden: Path, snapshot: Snapshot, step: int, facts: dict[str, Any]) -> None:
        saved.append(step)
        write(self, hidden, snapshot, step, facts)

    def dying(*args: Any) -> Any:
        is_saving = threading.current_thread() is not threading.main_thread()
        if os.environ["RANK"] == str(rank) and is_saving and saved[-1:] == [4]:
            die()
        return call(*args)

    CheckpointStore._write = writing
    return dying


kill_a_worker_of_rank_one = in_step(3, kill_worker, rank=1)


def kill_while_writing(out: Path) -> None:
    """Kill rank 1 when its file of step 4 is written and not yet synced to the disk."""
    os.fsync = while_saving_step_4(os.fsync, rank=1)


def kill_while_publishing(out: Path) -> None:
    """Kill rank 0 when step 4 has its final name, before that is synced and older checkpoints go."""
    checkpoint_folder.sync = while_saving_step_4(checkpoint_folder.sync, rank=0)


def fill_disk(out: Path) -> None:
    """Let the disk be full for what rank 1 writes of step 4: its file is /dev/full."""
    prepare = CheckpointFolder.prepare

    def filled(self: CheckpointFolder, hidden: Path) -> None:
        prepare(self, hidden)
        if hidden == self.hidden(4, "saving"):
            (hidden / "__1_0.distcp").symlink_to("/dev/full")

    CheckpointFolder.prepare = filled


def heed_modes(out: Path) -> None:
    """Let modes of files count for root too, by giving up the capabilities that pass over them."""
    header, held = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    kernel = ctypes.CDLL(None, use_errno=True)
    assert kernel.capget(header, held) == 0
    held[0] &= ~DAC_OVERRIDE_AND_READ_SEARCH  # the effective ones
    assert kernel.capset(header, held) == 0


def forbid_writing(out: Path) -> None:
    """Take the run directory's write permission in the third step."""
    heed_modes(out)
    folders = (run_of(out), run_of(out) / "checkpoints")
    in_step(3, lambda: [folder.chmod(0o555) for folder in folders], rank=0)(out)


def allow_writing(out: Path) -> None:
    """Give the permission back."""
    for folder in (run_of(out), run_of(out) / "checkpoints"):
        folder.chmod(0o755)


def truncate_newest(out: Path) -> None:
    """Cut a file of the newest checkpoint in half, before the start that would read it."""
    file = run_of(out) / "checkpoints" / "step_4" / "__1_0.distcp"
    if os.environ["RANK"] == "0":
        os.truncate(file, file.stat().st_size // 2)


def lose_connection(out: Path) -> None:
    """Ask the server of the test, by a file, to cut every answer from the third step on, and wait little in between."""
    storage._FIRST_WAIT_SECONDS = 0.001
    in_step(3, lambda: lost(out).touch(), rank=0)(out)


def restore_connection(out: Path) -> None:
    """Let the server answer again."""
    lost(out).unlink(missing_ok=True)


def lost(out: Path) -> Path:
    """Return the file that is there while no answer of the server arrives."""
    return run_of(out).with_name("connection_is_lost")
