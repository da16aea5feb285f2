"""The one seam through which a module is recomputed, compiled and sharded (FSDP2 on a (replicate, shard) mesh).

single (1, 1), ddp (N, 1) and fsdp (1, N) are points of the same mesh and run the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

BYTES_PER_TRAINABLE = 18
"""fp32 master, gradient and two Adam moments, and the bf16 copy that computes."""


def parallelize(
    root: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    compile_units: bool,
) -> None:
    """Compile and shard `root` in place, unit by unit, then the rest of it. Collective.

    Parameters keep their own dtype as sharded masters; compute runs in `compute_dtype`. The root's policy
    does not cast its inputs, so that timestep ratios stay fp32; the units' policy does. Gradients are
    reduced in fp32.
    """
    if compile_units:
        for module in (module for unit in units for module in unit):
            module.compile()
    unit_policy, root_policy = (
        MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=cast)
        for cast in (True, False)
    )
    for unit in units:
        fully_shard(list(unit), mesh=mesh, mp_policy=unit_policy, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=mesh, mp_policy=root_policy, reshard_after_forward=reshard_after_forward)


def fits_one_device(roots: Sequence[nn.Module], device: torch.device) -> bool:
    """Return whether weights, gradients and optimizer state take at most 70 % of the device unsharded.

    The rest is for activations and encoders. On a CPU the answer is yes.
    """
    if device.type != "cuda":
        return True
    parameters = [parameter for root in roots for parameter in root.parameters()]
    need = sum(p.numel() * (BYTES_PER_TRAINABLE if p.requires_grad else p.element_size()) for p in parameters)
    return need <= 0.7 * torch.cuda.get_device_properties(device).total_memory


def set_gradient_sync(roots: Iterable[nn.Module], enabled: bool) -> None:
    """Choose whether the next backward reduces gradients over the ranks (off for all but the last micro-batch)."""
    for root in roots:
        if isinstance(root, FSDPModule):
            root.set_requires_gradient_sync(enabled)
            root.set_is_last_backward(enabled)


def reshard(roots: Iterable[nn.Module]) -> None:
    """Free gathered weights, so that the next forward sees what was written into the shards."""
    for module in (m for root in roots for m in root.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def evaluating(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode without gradients for the block, then every submodule back as it was."""
    modes = [(module, module.training) for root in roots for module in root.modules()]
    for root in roots:
        root.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        reshard(roots)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor (sharing its memory), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
