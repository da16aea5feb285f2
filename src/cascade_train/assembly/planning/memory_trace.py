"""Trace the allocations of a run's own optimizer steps on torch's meta device, and count FLOPs.

Nothing is loaded or sent, and no tensor has memory. Must not live here: conclusions (memory.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy
from torch.nn import functional
from torch.optim import optimizer
from torch.utils._pytree import tree_iter, tree_map_only

from cascade_train.assembly.components import Parts
from cascade_train.assembly.model import bind, build_modules, compute_dtype, quantize_base, shard, stored_dtype
from cascade_train.assembly.planning.allocations import CUDA_BLOCK_BYTES, META, Allocations, ShapeCache
from cascade_train.batch import Batch
from cascade_train.distributed.parallelize import make_copies, reshard, set_gradient_sync
from cascade_train.distributed.sharded import gathered_alone
from cascade_train.engine.optimizer import fill_state
from cascade_train.engine.phase import training_state
from cascade_train.filters.base import ControlFilter, ControlMap, Encode, float_map
from cascade_train.tasks.base import Export, Phase
from cascade_train.tasks.controlnet import ControlNet

WEIGHTS, COPIES, GRADIENTS, OPTIMIZER = "weights", "copies in the dtype of compute", "gradients", "optimizer"
AVERAGE, ENCODERS, BATCH, ACTIVATIONS, UPDATE = "average", "encoders", "batch", "activations", "update"

Curves = Mapping[str, np.ndarray]
"""Bytes after each operation, (T,) int64 by what they are for."""

Trace = tuple[Curves, Sequence[Any], int]
"""Curves of a step, the operations that their moments follow, and its FLOPs."""

LAST_STEP = 2**62
"""Step that is traced, for tasks that count."""

ON_HOST = ("keep_image_B",)
"""Fields of prepared batches that a loss reads on the host."""


@dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """Allocations and FLOPs of traced steps on one rank.

    Attributes:
        curves: of each step.
        operations: of each step, those that the moments of its curves follow.
        flops: for each sample, a multiply-add counted as two.
        update_flops: of a step whatever its samples, such as an optimizer's.
        parameters: of each module, how many there are, and how many of them train.
        gathered: bytes that a rank gathers at once, where weights are split.
        checkpoint_bytes: over all ranks.
        export_bytes: of the trained weights that are exported.
    """

    curves: Sequence[Curves]
    operations: Sequence[Sequence[Any]]
    flops: float
    update_flops: float
    parameters: Mapping[str, tuple[int, int]]
    gathered: int
    checkpoint_bytes: int
    export_bytes: int


def trace_steps(cfg: DictConfig, parts: Parts, batches: Sequence[Batch], *, on_cuda: bool = True) -> MemoryTrace:
    """Take a step with each of two or more micro-batches of different sizes, on one rank with whole weights.

    `cfg` is from `unloaded`, `parts` are of it and not built yet. `on_cuda`: count what a CUDA device keeps; False =
    what this CPU does.
    """
    fused = [*optimizer._get_fused_kernels_supported_devices(), META.type]
    kernels = {"scaled_dot_product_attention": partial(_attention, on_cuda=on_cuda)}
    if on_cuda:
        kernels["dropout"] = _dropout  # type: ignore[assignment]
    with _replaced(optimizer, _get_fused_kernels_supported_devices=lambda: fused), torch.random.fork_rng(devices=[]):
        if isinstance(parts.task, ControlNet):
            parts.task.filter = NoFilter(parts.task.filter)
        with ShapeCache() as shapes:
            build_modules(cfg, parts, META, network_dtype=stored_dtype(cfg, parts))
            quantize_base(cfg, parts)
            parts.task.device = torch.device("cpu")
            prepared = [parts.task.prepare_batch(batch) for batch in batches]
        parts.task.device = META
        if "step" in (state := parts.task.state_dict()):  # what begins later in a run takes part
            parts.task.load_state_dict({**state, "step": torch.tensor(LAST_STEP)})
        mesh = DeviceMesh("cpu", [[0]], mesh_dim_names=("replicate", "shard"), _init_backend=False, _rank=0)
        allocations = Allocations(block_bytes=CUDA_BLOCK_BYTES if on_cuda else 1, shapes=shapes)
        with _replaced(functional, **kernels), allocations:
            run = _RecordedRun(cfg, parts, allocations, mesh)
            run.warm_up(prepared[0])
            return _summary(parts, run, [run.step(each) for each in prepared], [len(batch) for batch in batches])


def _summary(parts: Parts, run: _RecordedRun, traces: Sequence[Trace], sizes: Sequence[int]) -> MemoryTrace:
    small, large = (flops for *_, flops in traces[-2:])
    flops = (large - small) / (sizes[-1] - sizes[-2])
    return MemoryTrace(
        curves=[curves for curves, *_ in traces],
        operations=[operations for _, operations, _ in traces],
        flops=flops,
        update_flops=large - sizes[-1] * flops,
        parameters=run.parameters,
        gathered=run.gathered,
        checkpoint_bytes=_bytes(training_state(run.phases, parts.task)),
        export_bytes=sum(map(_export_bytes, parts.task.exports().values())),
    )


class _RecordedRun:
    def __init__(self, cfg: DictConfig, parts: Parts, allocations: Allocations, mesh: DeviceMesh) -> None:
        self._allocations = allocations
        phases = parts.task.phases()
        roots = [root for phase in phases for root in phase.modules.values()]
        self._on_meta: dict[Tensor, Tensor] = {}
        self.parameters = _parameter_counts(parts, phases)
        kept = not cfg.parallel.reshard_after_forward
        self.gathered = sum(_gathered(phase, compute_dtype(cfg), kept=kept) for phase in phases)
        allocations.label = WEIGHTS
        for root in roots:
            self._move_module(root)
        allocations.label = ENCODERS
        self._move_attributes(parts.task, set())
        allocations.label = WEIGHTS
        shard(cfg, phases, mesh, OffloadPolicy())
        allocations.label = AVERAGE
        self.phases = [bind(cfg, phase, parts) for phase in phases]
        allocations.label = OPTIMIZER
        for bound in self.phases:
            fill_state(bound.optimizer)
            if bound.can_withhold:  # kept from one update to the next
                bound.optimizer.found_inf = torch.zeros((), device=META)  # type: ignore[attr-defined]
        allocations.label = COPIES
        make_copies(roots)
        reshard(roots)

    def _move_module(self, module: nn.Module) -> None:
        for owner in module.modules():
            for tensors in (owner._parameters, owner._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = self._moved(tensor)

    def _moved(self, tensor: Tensor) -> Any:
        if tensor not in self._on_meta:
            bare = tensor if tensor.is_meta else tensor.detach().to(META)
            if isinstance(tensor, nn.Parameter) and bare is not tensor:
                bare = nn.Parameter(bare, tensor.requires_grad)
            self._allocations.record([bare])
            self._on_meta[tensor] = self._on_meta[bare] = bare
        return self._on_meta[tensor]

    def _move_attributes(self, owner: Any, seen: set[int]) -> None:
        """Move modules and tensors in the attributes of an object of this library, and of those below it."""
        if id(owner) in seen:
            return
        seen.add(id(owner))
        for name, value in list(vars(owner).items()):
            if isinstance(value, nn.Module):
                self._move_module(value)
            elif isinstance(value, Tensor | dict):
                vars(owner)[name] = tree_map_only(Tensor, self._moved, value)
            elif type(value).__module__.startswith("cascade_train.") and hasattr(value, "__dict__"):
                self._move_attributes(value, seen)

    def warm_up(self, prepared: Any) -> None:
        """Compute the losses once: they make tables, as of noise levels, that steps reuse."""
        self._allocations.label = ACTIVATIONS
        for bound in self.phases:
            bound.phase.loss(on_meta(prepared))

    def step(self, prepared: Any) -> Trace:
        """Take an optimizer step on one micro-batch, as the loop does."""
        allocations = self._allocations
        allocations.counts_flops, allocations.flops, allocations.label = True, 0, BATCH
        prepared = on_meta(prepared)
        tensors = (value for value in tree_iter(vars(prepared)) if isinstance(value, Tensor))
        allocations.record(tensor for tensor in tensors if tensor.is_meta)
        begin = allocations.tick
        for bound in self.phases:
            allocations.label = ACTIVATIONS
            set_gradient_sync(bound.roots, last=True)
            output = bound.phase.loss(prepared)
            output.loss_B.sum().backward()
            del output
            allocations.relabel(ACTIVATIONS, GRADIENTS)
            allocations.label = UPDATE
            bound.clip()
            bound.update(bound.phase.start_step + 1, bound.phase.start_step + 1, torch.zeros((), device=META))
        allocations.counts_flops = False
        trace = allocations.curves(begin), allocations.operations(begin), allocations.flops
        allocations.relabel(UPDATE, OPTIMIZER)  # of algorithms that make their state anew
        return trace


def _parameter_counts(parts: Parts, phases: Sequence[Phase]) -> dict[str, tuple[int, int]]:
    roots = {name: root for phase in phases for name, root in phase.modules.items()}
    modules = (parts.stage.frozen_modules() | roots).items()
    numbers = {name: [(p.numel(), p.requires_grad) for p in module.parameters()] for name, module in modules}
    return {name: (sum(n for n, _ in each), sum(n for n, trains in each if trains)) for name, each in numbers.items()}


def _gathered(phase: Phase, dtype: torch.dtype, *, kept: bool) -> int:
    """Bytes that FSDP2 gathers at once.

    What lies in no unit, the largest unit twice (the next one is gathered before), or all units where they are kept for
    backward; and the gradients of a unit, which are exchanged in fp32. What is gathered at once takes 8 bytes a number
    that trains, as gradients and as they are sent: the weights are freed by then (measured,
    tests/distributed/test_plan.py).
    """

    def whole(parameters: Iterable[nn.Parameter]) -> int:
        return sum(p.numel() * (dtype.itemsize if p.is_floating_point() else p.element_size()) for p in parameters)

    gathered = 0
    for name, root in phase.modules.items():
        alone = gathered_alone(root, phase.units[name], gather_whole=name in phase.gathered_whole)
        units = [[p for module in unit for p in module.parameters()] for unit in alone]
        sizes = [(whole(unit), sum(p.numel() for p in unit if p.requires_grad)) for unit in units]
        rest = whole(root.parameters()) - sum(size for size, _ in sizes)
        doubled = 0 if kept else 2
        largest = max((doubled * size + (dtype.itemsize + 4) * trains for size, trains in sizes), default=0)
        at_once = rest + largest + (sum(size for size, _ in sizes) if kept else 0)
        gathered += at_once if units else max(rest, 8 * sum(p.numel() for p in root.parameters() if p.requires_grad))
    return gathered


def _bytes(state: Any) -> int:
    return sum(value.numel() * value.element_size() for value in tree_iter(state) if isinstance(value, Tensor))


def _export_bytes(export: Export) -> int:
    frozen = {n for n, p in export.module.named_parameters() if not p.requires_grad}
    state = export.module.state_dict()
    return _bytes({n: value for n, value in state.items() if export.whole or n not in frozen})


class NoFilter(ControlFilter):
    """Takes maps as they are, in place of a filter whose files may not be here."""

    def __init__(self, instead_of: ControlFilter) -> None:
        self.channels = instead_of.channels
        self.node = instead_of.node  # type: ignore[method-assign]

    def build(self, *, device: torch.device, encode: Encode) -> ControlMap:
        """Maps of the batch."""
        return float_map


def on_meta(value: Any) -> Any:
    """A prepared batch on the meta device, except what a loss reads on the host."""
    moved = {
        field.name: tree_map_only(Tensor, lambda tensor: tensor.to(META), getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.name not in ON_HOST
    }
    return dataclasses.replace(value, **moved)


def unloaded(cfg: DictConfig) -> DictConfig:
    """A configuration of the same sizes that names no weights to read."""
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.model.weights = None
        if "random_encoders" in cfg.model:
            cfg.model.random_encoders = True
        cfg.ema.weights = cfg.ema.device = None
        for key in ("weights", "backbone_weights"):
            if key in cfg.task:
                cfg.task[key] = None
        if cfg.task.get("train_tokens"):
            cfg.task.train_tokens = [[f"[planned{i}]", None] for i in range(len(cfg.task.train_tokens))]
        if str(cfg.attention.value) == "xformers":
            cfg.attention = type(cfg.attention)("sdpa")
        cfg.compile = type(cfg.compile)("off")
    return cfg


@contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    kept = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(kept)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, train=True)[0] if training and p > 0 else x


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    on_cuda: bool,
) -> Tensor:
    """Attend as flash attention does, and where it cannot as a device does then.

    That is on a CUDA device (fp32, masks) memory-efficient attention, on a CPU (dropout) the matrix of probabilities.
    """
    aten = torch.ops.aten
    if not on_cuda and dropout_p > 0.0:
        by_matrix = aten._scaled_dot_product_attention_math
        return by_matrix(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale)[0]
    if not on_cuda:
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    bias = attn_mask if attn_mask is None or attn_mask.is_floating_point() else attn_mask.to(query.dtype)
    if bias is not None:
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, keeps, dropout_p, is_causal, scale=scale)[0]
