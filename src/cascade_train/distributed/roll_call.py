"""Which rank hung or died, and in which step: told by those that are left, from notes that all ranks keep.

How long ranks wait for each other is decided here too; what is done in a step is not.
"""

from __future__ import annotations

import faulthandler
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from cascade_train.distributed.process_group import SET_UP_SECONDS
from cascade_train.errors import LOST_PEER, RankLostError, RunError

DEVICE_GRACE_SECONDS = 60.0
"""How much longer the device's own exchange waits than that of the hosts, whose failure can be told in words."""

ANSWER_SECONDS = 3.0
"""How long ranks have to answer a roll call: about the time in which all notice that one is lost."""

MOST_NAMED = 8
STDERR = 2


class RollCall:
    """Notes of the steps that ranks are in, where all can read them, and how long a step waits for a rank.

    With one rank it does nothing.
    """

    def __init__(self, *, rank: int, ranks: int, timeout_seconds: float) -> None:
        """Store.

        Args:
            rank: this process.
            ranks: number of processes.
            timeout_seconds: how long a step waits for a rank, from the second one on; the first compiles and the like.
        """
        self._rank, self._ranks = rank, ranks
        self._timeout_seconds = timeout_seconds
        self._store = _get_default_store()
        self._noted = 0

    @contextmanager
    def step(self, step: int, groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
        """Note that a step begins, and wait for other ranks in it no longer than for the timeout.

        A rank that hangs in it says where, by the stacks of its threads.

        Args:
            step: its number.
            groups: over which it exchanges, beside the default group.
        """
        if self._ranks == 1:
            yield
            return
        is_first, self._noted = self._noted == 0, step
        self._store.set(f"step_of_{self._rank}", f"{step} {time.time():.1f} {socket.gethostname()}")
        if is_first:
            set_timeout(groups, SET_UP_SECONDS)
            yield
            return
        set_timeout(groups, self._timeout_seconds)
        faulthandler.dump_traceback_later(self._timeout_seconds, file=STDERR)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            set_timeout(groups, SET_UP_SECONDS)

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Name the ranks that are lost when the block ends because of them.

        Raises:
            RankLostError: which ranks, on which machines, in which steps; one of those that are left says it.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunError) or not LOST_PEER.search(str(error)):
                raise
            answered = self._answers()
            if len(answered) == self._ranks:
                raise
            raise RankLostError(self._describe(answered), shared=self._rank != min(answered)) from error

    def _answers(self) -> list[int]:
        """Answer, and return which ranks did; this one alone where the notes are gone with the rank that kept them."""
        try:
            self._store.set(f"answer_of_{self._rank}", "")
            time.sleep(ANSWER_SECONDS)
            return [rank for rank in range(self._ranks) if self._store.check([f"answer_of_{rank}"])]
        except RuntimeError:
            return [self._rank]

    def _describe(self, answered: Sequence[int]) -> str:
        lost = [rank for rank in range(self._ranks) if rank not in answered]
        named = ", ".join(self._last_note(rank) for rank in lost[:MOST_NAMED])
        more = "" if len(lost) <= MOST_NAMED else f", and {len(lost) - MOST_NAMED} more"
        return (
            f"Ranks are lost: {named}{more}; rank {self._rank} is in step {self._noted}. Where they said nothing "
            "themselves they were killed, as the system does when memory runs out, or they hang. The same command "
            "continues from the newest checkpoint; run.timeout_seconds says how long a step waits."
        )

    def _last_note(self, rank: int) -> str:
        try:
            note = self._store.get(f"step_of_{rank}").decode() if self._store.check([f"step_of_{rank}"]) else ""
        except RuntimeError:
            return f"rank {rank} (its note is gone with rank 0)"
        if not note:
            return f"rank {rank} (before its first step)"
        step, begun, host = note.split()
        return f"rank {rank} on {host} (in step {step}, begun {time.time() - float(begun):.0f} s ago)"


def groups_of(parameters: Iterable[nn.Parameter]) -> list[dist.ProcessGroup]:
    """Return the groups over which sharded parameters are exchanged."""
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    return [group for mesh in meshes for group in mesh.get_all_groups()]


def set_timeout(groups: Sequence[dist.ProcessGroup], seconds: float) -> None:
    """Set how long exchanges that begin from now on wait, in the default group and others."""
    default = dist.group.WORLD
    assert default is not None
    for group in {default, *groups}:
        for device in group._device_types:
            late = DEVICE_GRACE_SECONDS if device.type == "cuda" else 0.0
            group._get_backend(device)._set_default_timeout(timedelta(seconds=seconds + late))
