"""How FSDP2 exchanges shards between ranks that compute on a CPU.

gloo's own operations copy the whole, and reduce all gradients on every rank. Here a rank gets its own shard only.

Shape legend: R ranks, N numbers of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp


class _Exchange:
    """Allocates memory as FSDP2 asks; its own classes are not public."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory for an input or output."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Exchange):
    """Every rank sends its shard to all. Collective."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill the output (R * N,) from inputs (N,), which may be their parts of it; all has come on return."""
        parts = output_tensor.chunk(group.size())
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        sent = [dist.broadcast(part, group_src=rank, group=group, async_op=True) for rank, part in enumerate(parts)]
        for work in sent:
            assert work is not None  # this rank is of the group
            work.wait()


class Scatter(_Exchange):
    """Every rank sends each other its part of a gradient, and adds what comes in the order of ranks. Collective."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill the output (N,) with the sum or mean of the ranks' parts of inputs (R * N,); all has come on return."""
        assert op in (ReduceOp.SUM, ReduceOp.AVG), op
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)
        if op == ReduceOp.AVG:
            output_tensor.div_(group.size())
