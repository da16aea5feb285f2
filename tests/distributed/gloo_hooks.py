"""What each rank of test_gloo does. A hook of forked.py."""

from pathlib import Path

import torch
import torch.distributed as dist

from cascade_train.distributed.process_group import process_group
from cascade_train.distributed.sharded import Gather, Scatter

NUMBERS = 5


def draws(rank: int, count: int) -> torch.Tensor:
    """Return what a rank brings."""
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def exchange(out: Path) -> None:
    """Write what comes of each exchange to `<out>/exchanged_<rank>`."""
    with process_group() as world:
        group = dist.group.WORLD
        found = {}
        whole = torch.empty(world.ranks * NUMBERS)
        Gather()(whole, draws(world.rank, NUMBERS), group)
        found["gathered"] = whole
        for dtype in (torch.bfloat16, torch.uint8):
            held = torch.full((world.ranks, NUMBERS), 255).to(dtype)
            held[world.rank] = world.rank
            Gather()(held.view(-1), held[world.rank], group)
            found[f"in place, {dtype}"] = held
        for name in ("SUM", "AVG"):
            shard = torch.full((NUMBERS,), torch.nan)
            gradients = draws(world.rank, world.ranks * NUMBERS)
            Scatter()(shard, gradients, group, getattr(dist.ReduceOp, name))
            found[name] = shard
        try:
            Scatter()(shard, gradients, group, dist.ReduceOp.MAX)
        except AssertionError:
            found["MAX"] = "refused"
        torch.save(found, out / f"exchanged_{world.rank}")
