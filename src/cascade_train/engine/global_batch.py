"""What a phase's outputs say about the whole global batch, on every rank.

Shape legend: B samples of a micro-batch, G samples of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cascade_train.tasks.base import StepOutput


def gather_samples(outputs: Sequence[StepOutput]) -> dict[str, Tensor]:
    """Return `loss` and every reported value of the whole global batch, (G,) or (G, n) each, in its order. Collective.

    Args:
        outputs: of this rank's micro-batches.
    """
    names = ["loss", *sorted(outputs[0].report)]
    rows = [torch.cat([o.loss_B.detach() if n == "loss" else o.report[n] for o in outputs]).float() for n in names]
    mine = torch.cat([row.reshape(len(row), -1) for row in rows], dim=1)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    parts = torch.cat(every).split([row[0].numel() for row in rows], dim=1)
    return {n: p.reshape(len(p), *row.shape[1:]).contiguous() for n, p, row in zip(names, parts, rows, strict=True)}


def sum_totals(outputs: Sequence[StepOutput]) -> dict[str, Tensor]:
    """Return the totals of the whole global batch; nothing is sent where there are none. Collective.

    Args:
        outputs: of this rank's micro-batches.
    """
    totals = {name: torch.stack([o.totals[name] for o in outputs]).sum(dim=0) for name in sorted(outputs[0].totals)}
    for total in totals.values():
        dist.all_reduce(total)
    return totals
