"""What any rank wants of all, agreed on between steps without waiting for the device.

What a motion leads to is the loop's business; nothing here knows signals, time or checkpoints.
"""

from __future__ import annotations

from datetime import timedelta
from enum import IntFlag

import torch
import torch.distributed as dist

from cascade_train.distributed.consensus import own_group


class Motion(IntFlag):
    """What a rank may ask of all ranks."""

    STOP = 1
    """Save and end."""
    SAVE_FAILED = 2
    """The save in flight has failed on a rank: finish it, which raises."""


class Ballot:
    """One vote for every optimizer step: a motion of any rank is carried by all, on the same step.

    With several ranks a vote is known one step after it was cast: it travels, as a host tensor over gloo, while the
    next step runs. With one rank it is known at once.
    """

    def __init__(self, *, timeout_seconds: float) -> None:
        """Open a group of its own, so that votes meet no other exchange. Collective.

        Args:
            timeout_seconds: how long a vote may wait for the other ranks.
        """
        self._group: dist.ProcessGroup | None = None
        self._travelling: tuple[dist.Work, torch.Tensor] | None = None
        if dist.get_world_size() > 1:
            self._group = own_group(timedelta(seconds=timeout_seconds))

    def cast(self, motions: Motion) -> Motion:
        """Cast this rank's motions and return what is carried: with several ranks, by the vote before. Collective."""
        if self._group is None:
            return motions
        counted = self._count()
        box = torch.tensor([int(motion in motions) for motion in Motion], dtype=torch.int32)
        work = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "this rank belongs to the group"
        self._travelling = (work, box)
        return counted

    def _count(self) -> Motion:
        if self._travelling is None:
            return Motion(0)
        work, box = self._travelling
        work.wait()
        carried = Motion(0)
        for motion, cast in zip(Motion, box.tolist(), strict=True):
            carried |= motion if cast else Motion(0)
        return carried
