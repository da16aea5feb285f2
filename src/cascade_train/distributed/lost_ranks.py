"""Which rank hung or died, and in which step: reported by the others, from a heartbeat that all ranks write."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from cascade_train.distributed.process_group import SET_UP_SECONDS, set_timeout
from cascade_train.errors import LOST_PEER, ConfigError, Interrupted, RankLostError, RunError

ANSWER_SECONDS = 3.0
"""How long ranks have to answer once one is lost."""

MOST_NAMED = 8
STDERR = 2
FIRST_ERROR = "first_error"
RANK_ZERO_LOST = (
    "Rank 0 has ended, and with it the store of all ranks; rank {rank} is in step {step}. The reason is in the output "
    "of rank 0; if there is none, rank 0 was killed, as the system does when memory runs out. The same command "
    "continues from the newest checkpoint."
)
"""Without torchrun, whose store outlives the ranks."""


class Heartbeat:
    """The step that each rank is in, in a store that all can read, and how long a step waits for a rank.

    With one rank it does nothing. The timeout applies from the second step on, since the first may compile.
    """

    def __init__(self, *, rank: int, ranks: int, timeout_seconds: float) -> None:
        self._rank, self._ranks = rank, ranks
        self._timeout_seconds = timeout_seconds
        self._store = _get_default_store()
        self._noted = 0

    @contextmanager
    def step(self, step: int, groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
        """Note that a step begins; its exchanges, in `groups` and the default group, wait no longer than the timeout.

        A rank that hangs in it prints the stacks of its threads.
        """
        if self._ranks == 1:
            yield
            return
        is_first, self._noted = self._noted == 0, step
        self._store.set(f"step_of_{self._rank}", f"{step} {time.time():.1f} {socket.gethostname()}")
        set_timeout(groups, SET_UP_SECONDS if is_first else self._timeout_seconds)
        if is_first:
            yield
            return
        faulthandler.dump_traceback_later(self._timeout_seconds, file=STDERR)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            set_timeout(groups, SET_UP_SECONDS)

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Raise RankLostError if the block fails because of another rank, with its error, or machine and step."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunError) or not LOST_PEER.search(str(error)):
                raise
            if (lost := self._lost()) is None:
                raise
            raise lost from error

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Note the error that ends this rank for the others."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if self._ranks > 1 and not isinstance(error, RankLostError):
                text = str(error) if isinstance(error, ConfigError | RunError | Interrupted) else repr(error)
                code = error.code if isinstance(error, Interrupted) else 2 if isinstance(error, ConfigError) else 1
                note = [self._rank, socket.gethostname(), self._noted, text, code]
                with suppress(RuntimeError):  # the store is gone with rank 0, which has ended before
                    self._store.compare_set(FIRST_ERROR, "", json.dumps(note))
            raise

    def _lost(self) -> RankLostError | None:
        """The first error, or the lost ranks; None if all answer. Only one rank's is not `shared`."""
        try:
            if self._store.check([FIRST_ERROR]):
                rank, host, step, text, code = json.loads(self._store.get(FIRST_ERROR))
                place = f"in step {step}" if step else "before the first step"
                is_reporter = self._rank == (1 if rank == 0 else 0)
                return RankLostError(
                    f"Rank {rank} on {host} ended the run {place}: {text}", shared=not is_reporter, code=code
                )
            answered = self._answers()
        except RuntimeError:
            is_reporter = self._rank == 1 or os.environ.get("LOCAL_RANK") == "0"
            return RankLostError(RANK_ZERO_LOST.format(rank=self._rank, step=self._noted), shared=not is_reporter)
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
            f"Ranks are lost: {named}{more}; rank {self._rank} is in step {self._noted}. Those whose output has no "
            "error were killed, as the system does when memory runs out, or they hang. The same command continues from "
            "the newest checkpoint; run.timeout_seconds limits how long a step waits."
        )

    def _last_note(self, rank: int) -> str:
        if not self._store.check([f"step_of_{rank}"]):
            return f"rank {rank} (before its first step)"
        step, begun, host = self._store.get(f"step_of_{rank}").decode().split()
        return f"rank {rank} on {host} (in step {step}, begun {time.time() - float(begun):.0f} s ago)"
