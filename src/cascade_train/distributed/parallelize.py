"""The one place where a module is compiled and sharded (FSDP2 on a (replicate, shard) mesh).

single (1, 1), ddp (N, 1), fsdp (1, N) and hsdp (R, S) are points of one mesh. Where the shard size is 1 a module stays
plain (whole.py); else it is sharded by FSDP2 (sharded.py). This is the only place that knows which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol, cast, runtime_checkable
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils.weak import WeakIdKeyDictionary

from cascade_train.distributed.sharded import Sharded
from cascade_train.distributed.whole import Whole
from cascade_train.errors import ConfigError, RunError

_WHOLE: WeakKeyDictionary[nn.Module, ref[Whole]] = WeakKeyDictionary()
"""The module's own hook keeps its Whole: a strong reference here would keep both forever."""

_SHARDED: WeakKeyDictionary[nn.Module, Sharded] = WeakKeyDictionary()

_SHARDS = WeakIdKeyDictionary()
"""By sharded parameter, what `shard_of` returned for it."""

VARIANTS = 8
"""Kinds of calls of a module: with gradients or not, a batch of 1, few or 16 and more."""

FITS_SHARE = 0.7
"""Share of a device's memory for weights, gradients and optimizer state if each rank holds all of them."""


def parallelize(
    root: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    compile_units: bool,
    compile_fallback: bool = False,
    offload: OffloadPolicy | None = None,
    gather_whole: bool = False,
) -> None:
    """Compile and shard `root` in place, unit by unit, then the rest of it; what each rank holds whole stays plain.

    Parameters keep their own dtype as masters, on the meta device as shards without memory (`materialise`).
    Compute runs in `compute_dtype`. The root's policy does not cast its inputs, so that timestep ratios stay fp32; the
    units' policy does. Gradients are reduced in fp32. For `gather_whole` see `Phase.gathered_whole`.
    """
    if compile_units:
        compile_units_of(root, units, has_hooks=not is_whole(mesh, offload), fallback=compile_fallback)
    if is_whole(mesh, offload):
        move([*root.parameters(), *root.buffers()], _device_of(mesh))
        group = mesh.get_group(0) if mesh.size() > 1 else None
        casts = compute_dtype != torch.float32 or any(p.dtype != compute_dtype for p in root.parameters())
        if group is not None or casts:
            _WHOLE[root] = ref(Whole(root, units, compute_dtype=compute_dtype, group=group))
        return
    _SHARDED[root] = Sharded(
        root,
        units,
        mesh=mesh,
        compute_dtype=compute_dtype,
        reshard_after_forward=reshard_after_forward,
        offload=OffloadPolicy() if offload is None else offload,
        gather_whole=gather_whole,
    )


@runtime_checkable
class CompilesUnits(Protocol):
    """A network that compiles a unit as one function."""

    def compile_units(self, *, each_block: bool) -> int:
        """Compile the units, or each of their blocks, and return how often a function may be compiled."""


def compile_units_of(root: nn.Module, units: Sequence[Sequence[nn.Module]], *, has_hooks: bool, fallback: bool) -> None:
    """Compile the units of `root` in place, for all sizes; module by module where it has no function for a unit.

    `has_hooks`: the blocks have hooks that no graph contains (FSDP2). `fallback`: what needs more graphs than expected
    runs without compilation, instead of a RunError.
    """
    import torch._dynamo  # takes seconds

    torch.fx.experimental._config.use_duck_shape = (
        False  # else a square first bucket, whose sides are equal, has graphs of its own
    )
    config: Any = torch._dynamo.config
    if isinstance(root, CompilesUnits):
        config.recompile_limit = max(config.recompile_limit, root.compile_units(each_block=has_hooks))
    else:
        modules = [module for unit in units for module in unit]
        config.recompile_limit += VARIANTS * len(modules)  # graphs of all modules count together
        for module in modules:
            module.compile(dynamic=True)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * config.recompile_limit)
    config.fail_on_recompile_limit_hit = not fallback
    forward = root.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise RunError(
                "compile=regional: the network needs more graphs than expected, and each takes a minute to make. Set "
                "compile=off, or compile_fallback=true to run without compilation what has no graph by then; "
                f"TORCH_LOGS=recompiles shows why ({str(error).splitlines()[0]})"
            ) from error

    root.forward = run


def is_whole(mesh: DeviceMesh, offload: OffloadPolicy | None) -> bool:
    """Whether each rank holds all of a module's weights, on the device that computes."""
    return mesh.size(-1) == 1 and not isinstance(offload, CPUOffloadPolicy)


def _whole(module: nn.Module) -> Whole | None:
    return whole() if (whole := _WHOLE.get(module)) is not None else None


def move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move tensors, such as adapters made on the host, to a device in place; neither shards nor those on meta."""
    for tensor in tensors:
        if not tensor.is_meta and not isinstance(tensor, DTensor) and tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)


def _device_of(mesh: DeviceMesh) -> torch.device:
    """Device that this rank computes on."""
    is_cuda = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device(mesh.device_type)


def materialise(root: nn.Module, device: torch.device) -> dict[str, tuple[torch.Tensor, int]]:
    """Allocate this rank's rows of the parameters of `root` that are on the meta device; the values are undefined.

    Return the memory and the number of its first row by parameter name.
    """
    move(root.parameters(), device)  # not buffers: FSDP2 keeps them where it computes, also with offloaded shards
    shares = {}
    for prefix, owner in root.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            if parameter.is_meta:
                memory = torch.empty_like(local(parameter.detach()), device=device)
                setattr(owner, leaf, nn.Parameter(like(parameter, memory), requires_grad=parameter.requires_grad))
                shares[f"{prefix}.{leaf}".removeprefix(".")] = (memory, first_row(parameter))
    return shares


def refuse_meta(roots: Mapping[str, nn.Module]) -> None:
    """Raise AssertionError where a tensor in these modules is on the meta device, naming it."""
    for title, root in roots.items():
        named = [*root.named_parameters(), *root.named_buffers()]
        if left := [f"{title}.{name}" for name, tensor in named if tensor.is_meta]:
            raise AssertionError(f"{len(left)} tensors have no values: {', '.join(left[:3])}")


def first_row(parameter: nn.Parameter) -> int:
    """Number of the first row (of the first dimension) that this rank holds; FSDP2 splits like `chunk`."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    return min(rows, mesh.get_local_rank(mesh.ndim - 1) * -(-rows // mesh.size(-1)))


def sharded_of(parameters: Iterable[nn.Parameter]) -> list[DTensor]:
    """Parameters of which this rank holds a shard."""
    return [parameter for parameter in parameters if isinstance(parameter, DTensor)]


def trial_weight(sharded: Sequence[DTensor]) -> nn.Parameter:
    """A matrix with a gradient of zeros, sharded as the smallest of `sharded` is. Collective."""
    mesh = sharded[0].device_mesh
    values = torch.ones(min(2 * mesh.size(-1), *map(len, sharded)), 2, device=mesh.device_type)
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    weight = nn.Parameter(distribute_tensor(values, mesh, placements))
    weight.grad = torch.zeros_like(weight)
    return weight


def offload_policy(enabled: bool, device: torch.device) -> OffloadPolicy:
    """FSDP2's policy: shards, gradients and optimizer state in pinned memory on the host, or on the device."""
    if enabled and device.type == "cpu":
        raise ConfigError("parallel.cpu_offload=true: this run computes on the host already. Set it to false.")
    return CPUOffloadPolicy() if enabled else OffloadPolicy()


def fits_one_device(
    roots: Sequence[nn.Module], device: torch.device, *, compute_dtype: torch.dtype, state_bytes: Iterable[float]
) -> bool:
    """Whether weights, gradients and optimizer state take at most 70 % of the device unsharded.

    The rest is for activations and encoders. On a CPU the answer is yes. Weights of another dtype than `compute_dtype`
    have copies in it; of the optimizers' `state_bytes` for each number that trains the largest is taken.
    """
    if device.type != "cuda":
        return True
    need, state = 0.0, max(state_bytes)
    for parameter in (parameter for root in roots for parameter in root.parameters()):
        size = parameter.element_size()
        copy = compute_dtype.itemsize if parameter.dtype != compute_dtype else 0
        need += parameter.numel() * (size + parameter.requires_grad * (size + state + copy))
    return need <= FITS_SHARE * torch.cuda.get_device_properties(device).total_memory


def set_gradient_sync(roots: Iterable[nn.Module], last: bool) -> None:
    """Choose which gradients the next backward communicates, that of the step's `last` micro-batch or another.

    Those of whole weights: with the last alone. Those of sharded weights: scattered with each, so that no rank keeps a
    whole gradient, and added over the replicas with the last. Those of offloaded weights: with each, to leave the
    device.
    """
    for root in roots:
        if (sharded := _SHARDED.get(root)) is not None:
            sharded.set_gradient_sync(last)
        elif (whole := _whole(root)) is not None:
            whole.last = last


def make_copies(roots: Iterable[nn.Module]) -> None:
    """Make the copies that whole weights compute with now, not in the first forward."""
    for root in roots:
        if (whole := _whole(root)) is not None:
            whole.compute()


def settle_gradients(roots: Iterable[nn.Module]) -> None:
    """Wait for the gradients of a step's last backward, and put the masters in their place. Collective."""
    for root in roots:
        if (sharded := _SHARDED.get(root)) is not None:
            sharded.reshard()
        elif (whole := _whole(root)) is not None:
            whole.settle()


def groups_of(roots: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """Groups over which weights or gradients are exchanged."""
    roots = list(roots)
    meshes = {sharded.mesh for root in roots if (sharded := _SHARDED.get(root)) is not None}
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    return groups + [w.group for root in roots if (w := _whole(root)) is not None and w.group is not None]


def reshard(roots: Iterable[nn.Module]) -> None:
    """Free gathered weights and copies, so that the next forward sees what was written into the masters."""
    for module in (m for root in roots for m in root.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()
        elif (whole := _whole(module)) is not None:
            whole.rest()


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
    """This rank's shard of a DTensor (sharing its memory), or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # to_local() costs 10 times the host time


def like(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """`shard`, on any device, as this rank's part of a tensor that is laid out over the ranks as `tensor` is.

    Its rows are those of `tensor`; they may have another shape.
    """
    if not isinstance(tensor, DTensor) or isinstance(shard, DTensor):
        return shard
    spec, shape = tensor._spec, torch.Size([*tensor.shape[:1], *shard.shape[1:]])
    if shard.dtype != tensor.dtype or shape != tensor.shape:
        stride = tensor.stride() if shape == tensor.shape else torch.empty(shape, device="meta").stride()
        meta = TensorMeta(shape, stride, shard.dtype)
        spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)  # from_local() would bring it to the mesh's device


def part_of(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a value that every rank has whole, split as `tensor` is. No communication."""
    if not isinstance(tensor, DTensor):
        return value
    return local(distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None))


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's shard as a plain parameter, the same one at each call; a whole parameter as it is.

    Work on it costs the host what work on plain tensors does: DTensor plans each operation on each tensor.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter not in _SHARDS:
        _SHARDS[parameter] = nn.Parameter(local(parameter))
    return cast("nn.Parameter", _SHARDS[parameter])


@torch.no_grad()
def alias_shards(shards: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Give each parameter's shard its gradient, and its memory: FSDP2 may move that in the first forward."""
    for parameter, shard in shards:
        if shard is not parameter:
            if shard.data_ptr() != (memory := local(parameter)).data_ptr():
                shard.data = memory
            shard.grad = None if parameter.grad is None else local(parameter.grad)


@torch.no_grad()
def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Norm () of all gradients, over all ranks, with one exchange. Collective."""
    shards = [local(gradient) for gradient in gradients]
    norm: torch.Tensor
    if any(shard.dtype == torch.bfloat16 for shard in shards):
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(shards, 2, torch.float32)))
    else:
        norm = torch.nn.utils.get_total_norm(shards)
    mesh = next((gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)), None)
    if mesh is None or mesh.size(-1) == 1:
        return norm
    norms = [torch.empty_like(norm) for _ in range(mesh.size(-1))]
    dist.all_gather(norms, norm, group=mesh.get_group(mesh.ndim - 1))
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole
