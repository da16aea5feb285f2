"""Which rank hung or died, and in which step: told by those that are left, from notes that all ranks keep.

How long ranks wait for each other is decided here too; what is done in a step is not.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from cascade_train.distributed.process_group import SET_UP_SECONDS, set_timeout
from cascade_train.errors import LOST_PEER, ConfigError, Interrupted, RankLostError, RunError

ANSWER_SECONDS = 3.0
"""How long ranks have to answer a roll call: about the time in which all notice that one is lost."""

MOST_NAMED = 8
STDERR = 2
WORD = "word"
WITH_RANK_ZERO = (
    "Rank 0 has ended, and with it what ranks note for each other; rank {rank} is in step {step}. What rank 0 said "
    "tells why; where it said nothing it was killed, as the system does when memory runs out. The same command "
    "continues from the newest checkpoint."
)
"""What is left to say where rank 0 keeps the store; under torchrun it outlives the ranks."""


class Heartbeat:
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
    def naming_lost_ranks(self) -> Iterator[None]:
        """Name the rank that ended the run, or those that are lost, when the block ends because of them.

        Raises:
            RankLostError: what the rank said that ended the run, or which ranks are lost, on which machines, in which
                steps; one of those that are left says it.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunError) or not LOST_PEER.search(str(error)):
                raise
            lost = self._lost()
            if lost is None:
                raise
            raise lost from error

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Note for the other ranks why this one ends by itself."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if self._ranks > 1 and not isinstance(error, RankLostError):
                text = str(error) if isinstance(error, ConfigError | RunError | Interrupted) else repr(error)
                code = error.code if isinstance(error, Interrupted) else 2 if isinstance(error, ConfigError) else 1
                word = [self._rank, socket.gethostname(), self._noted, text, code]
                with suppress(RuntimeError):  # the store is gone with rank 0, which has ended before
                    self._store.compare_set(WORD, "", json.dumps(word))  # the first one counts
            raise

    def _lost(self) -> RankLostError | None:
        """Return who is lost, and what was said; None where all ranks are there. One rank is to say it."""
        try:
            if self._store.check([WORD]):
                rank, host, step, text, code = json.loads(self._store.get(WORD))
                place = f"in step {step}" if step else "before the first step"
                is_speaker = self._rank == (1 if rank == 0 else 0)
                return RankLostError(
                    f"Rank {rank} on {host} ended the run {place}: {text}", shared=not is_speaker, code=code
                )
            answered = self._answers()
        except RuntimeError:
            is_speaker = self._rank == 1 or os.environ.get("LOCAL_RANK") == "0"
            return RankLostError(WITH_RANK_ZERO.format(rank=self._rank, step=self._noted), shared=not is_speaker)
        if len(answered) == self._ranks:
            return None
        return RankLostError(self._describe(answered), shared=self._rank != min(answered))

    def _answers(self) -> list[int]:
        """Answer, and return which ranks did."""
        self._store.set(f"answer_of_{self._rank}", "")
        time.sleep(ANSWER_SECONDS)
        return [rank for rank in range(self._ranks) if self._store.check([f"answer_of_{rank}"])]

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
        if not self._store.check([f"step_of_{rank}"]):
            return f"rank {rank} (before its first step)"
        step, begun, host = self._store.get(f"step_of_{rank}").decode().split()
        return f"rank {rank} on {host} (in step {step}, begun {time.time() - float(begun):.0f} s ago)"


def groups_of(parameters: Iterable[nn.Parameter]) -> list[dist.ProcessGroup]:
    """Return the groups over which sharded parameters are exchanged."""
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    return [group for mesh in meshes for group in mesh.get_all_groups()]
