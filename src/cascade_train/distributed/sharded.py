"""A module whose weights are split over the ranks: its units under FSDP2.

Lives here: which units are gathered by themselves, with which policy, what all of them are asked, and how shards are
exchanged on a CPU. Must not live here: when a module is split, and what the loop calls (parallelize.py).

Shape legend: R ranks, N numbers of a shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ReduceOp
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from cascade_train.distributed.whole import BUCKET_BYTES, cast_inputs
from cascade_train.errors import ConfigError

GATHERED_AT_ONCE_BYTES = BUCKET_BYTES
"""Of a module's weights in fp32. Each gathering costs the host as much as a small layer, whatever its size: the tiny
models have up to 12 MiB, the smallest unit of Stage C's real ones has 119, and Stage A has 70 in all."""


SPLITS_CODES = torch.__version__ >= "2.12"
"""Whether FSDP2 takes weights that are no floating-point numbers."""


def gathered_alone(
    root: nn.Module, units: Sequence[Sequence[nn.Module]], *, gather_whole: bool = False
) -> list[list[nn.Module]]:
    """Units that are gathered one after the other: none of a small module, whose weights come at once.

    Not where those that train have several dtypes: FSDP2 takes one for what it gathers together. With `gather_whole`
    a module's weights come at once, however large it is.
    """
    if gather_whole:
        return []
    is_small = 4 * sum(parameter.numel() for parameter in root.parameters()) <= GATHERED_AT_ONCE_BYTES
    is_alike = len({parameter.dtype for parameter in root.parameters() if parameter.requires_grad}) <= 1
    return [] if is_small and is_alike else [list(unit) for unit in units]


class Sharded:
    """A module under FSDP2; refers to it weakly, so that it can be kept beside it.

    Attributes:
        mesh: (replicate, shard).
        is_split: ranks hold different parts of the weights.
        is_offloaded: the weights lie on the host of a device.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Sequence[nn.Module]],
        *,
        mesh: DeviceMesh,
        compute_dtype: torch.dtype,
        reshard_after_forward: bool,
        offload: OffloadPolicy,
        gather_whole: bool,
    ) -> None:
        """Shard a module in place, unit by unit, then what is left of it; a ConfigError where this torch cannot.

        What is left is needed from the first operation to the last, so that it stays gathered between forward and
        backward. Its policy does not cast inputs, so that timestep ratios stay fp32; that of the units does.
        """
        if not SPLITS_CODES and not all(parameter.is_floating_point() for parameter in root.parameters()):
            raise ConfigError(
                f"train.base_weights=int8 cannot be split over ranks by torch {torch.__version__}. Use torch 2.12 or "
                "newer, parallel=ddp, or train.base_weights=null."
            )
        policy = partial(MixedPrecisionPolicy, param_dtype=compute_dtype, reduce_dtype=torch.float32)
        over = mesh if mesh.size(0) > 1 else mesh["shard"]  # else gradients would be added over one replica, too
        shard = partial(fully_shard, mesh=over, offload_policy=offload)
        alone = gathered_alone(root, units, gather_whole=gather_whole)
        for unit in alone:
            shard(unit, mp_policy=policy(cast_forward_inputs=True), reshard_after_forward=reshard_after_forward)
        if not alone:
            cast_inputs(units, compute_dtype)
        shard(root, mp_policy=policy(cast_forward_inputs=False), reshard_after_forward=False)
        self.mesh = mesh
        self.is_split = mesh.size(-1) > 1
        self.is_offloaded = isinstance(offload, CPUOffloadPolicy) and mesh.device_type != "cpu"
        self._units = [ref(module) for module in (*(unit[0] for unit in alone), root)]
        if mesh.device_type == "cpu" and self.is_split:
            for module in self._found():
                module.set_custom_all_gather(cast("Any", Gather()))
                module.set_custom_reduce_scatter(cast("Any", Scatter()))

    def set_gradient_sync(self, last: bool) -> None:
        """Choose what the next backward communicates, see `parallelize.set_gradient_sync`."""
        scatter = last or self.is_split or self.is_offloaded
        for unit in self._found():
            unit.set_requires_gradient_sync(scatter, recurse=False)
            unit.set_requires_all_reduce(last or self.is_offloaded, recurse=False)
        unit.set_is_last_backward(scatter)  # the root, for all

    def reshard(self) -> None:
        """Free the gathered weights."""
        for unit in self._found():
            unit.reshard()

    def _found(self) -> Iterator[FSDPModule]:
        """Yield the units: looking for them among all modules takes milliseconds."""
        for unit in self._units:
            yield cast("FSDPModule", unit())


class _Exchange:
    """How FSDP2 exchanges shards between ranks that compute on a CPU: it asks for memory too; its own are not public.

    gloo's own operations copy the whole, and reduce all gradients on every rank. Here a rank gets its own shard only.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """New memory for an input or output."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Exchange):
    """Every rank sends its shard to all. Collective."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill the output (R * N,) from inputs (N,), which may be their parts of it; all has come on return."""
        parts = output_tensor.chunk(group.size())
        own_part = parts[group.rank()]
        if own_part.data_ptr() != input_tensor.data_ptr():
            own_part.copy_(input_tensor)
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
