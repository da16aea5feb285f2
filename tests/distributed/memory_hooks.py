"""What the second step of a rank holds at its peak. A hook of forked.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils._pytree import tree_iter

from cascade_train.assembly.planning.allocations import Allocations
from cascade_train.distributed import whole
from cascade_train.distributed.parallelize import local
from cascade_train.engine.loop import Trainer


def held(trainer: Trainer) -> Iterable[Any]:
    """Yield this rank's parts of what a run holds between steps."""
    roots = [root for phase in trainer.phases for root in phase.roots]
    for module in [*roots, *trainer.task.stage.frozen_modules().values()]:
        yield from (local(tensor.detach()) for tensor in (*module.parameters(), *module.buffers()))
    for phase in trainer.phases:
        yield from (value for state in phase.optimizer.state.values() for value in tree_iter(state))


def note_peak(out: Path) -> None:
    """Record the first two steps, as what is gathered keeps its storages, and write the peak of the second."""
    train_step, allocations = Trainer.train_step, Allocations()
    whole.BUCKET_BYTES = 2**18  # as small beside the weights as it is beside those of published networks

    def step(self: Trainer, micro_batches: Any) -> Any:
        with allocations:
            allocations.record(held(self))
            begin, values = allocations.tick, train_step(self, micro_batches)
        if self.step == 2:
            (out / f"peak_{dist.get_rank()}").write_text(json.dumps(int(sum(allocations.curves(begin).values()).max())))
        return values

    Trainer.train_step = step
