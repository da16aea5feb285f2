"""Build a run and take its own optimizer steps on torch's meta device: trace the allocations, and count FLOPs.

Nothing is loaded, drawn or sent, and no tensor has memory. Lives here: how a run is made to do that. Must not live
here: what is concluded (memory.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from cascade_train.assembly.planning.batches import NoFilter, on_meta
from cascade_train.assembly.planning.live import CUDA_BLOCK_BYTES, META, Live, Shapes
from cascade_train.batch import Batch
from cascade_train.distributed.parallelize import make_copies, reshard, set_gradient_sync
from cascade_train.distributed.sharded import gathered_alone
from cascade_train.engine.optimizer import fill_state
from cascade_train.engine.phase import training_state
from cascade_train.tasks.base import Export, Phase
from cascade_train.tasks.controlnet import ControlNet

WEIGHTS, COPIES, GRADIENTS, OPTIMIZER = "weights", "copies in the dtype of compute", "gradients", "optimizer"
AVERAGE, ENCODERS, BATCH, ACTIVATIONS, UPDATE = "average", "encoders", "batch", "activations", "update"

Curves = Mapping[str, np.ndarray]
"""Bytes after each operation, (T,) int64 by what they are for."""

LAST_STEP = 2**62
"""Step that is rehearsed, for tasks that count."""


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What steps hold and compute on one rank.

    Attributes:
        curves: of each step.
        operations: of each step, those that the moments of its curves follow.
        flops: floating-point operations of a step for each sample, a multiply-add counted as two.
        update_flops: those of a step whatever its samples, such as an optimizer's.
        parameters: of each module, how many there are, and how many of them train.
        gathered: bytes of what a rank gathers at once, where weights are split.
        checkpoint_bytes: of a checkpoint, over all ranks.
        weights_bytes: of one without the optimizer's state.
        export_bytes: of the trained weights that are exported.
    """

    curves: Sequence[Curves]
    operations: Sequence[Sequence[Any]]
    flops: float
    update_flops: float
    parameters: Mapping[str, tuple[int, int]]
    gathered: int
    checkpoint_bytes: int
    weights_bytes: int
    export_bytes: int


def rehearse(cfg: DictConfig, parts: Parts, batches: Sequence[Batch], *, on_cuda: bool = True) -> Rehearsed:
    """Take a step of a checked configuration with each of some micro-batches, on one rank with whole weights.

    Args:
        cfg: from `unloaded`.
        parts: of it, not built yet.
        batches: two at least, of different sizes, from `blank_batch` or `cached_batches`.
        on_cuda: count what a CUDA device keeps; False = what this CPU does.
    """
    with ExitStack() as stack:
        stack.enter_context(_fused_on_meta())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if isinstance(parts.task, ControlNet):
            parts.task.filter = NoFilter(parts.task.filter)
        stack.enter_context(Shapes())
        build_modules(cfg, parts, META, network_dtype=stored_dtype(cfg, parts))
        quantize_base(cfg, parts)
        mesh = DeviceMesh("cpu", [[0]], mesh_dim_names=("replicate", "shard"), _init_backend=False, _rank=0)
        parts.task.device = torch.device("cpu")
        prepared = [parts.task.prepare_batch(batch) for batch in batches]
        parts.task.device = META
        if "step" in (state := parts.task.state_dict()):  # what begins later in a run takes part
            parts.task.load_state_dict({**state, "step": torch.tensor(LAST_STEP)})
        stack.enter_context(_kernels(on_cuda=on_cuda))
        live = stack.enter_context(Live(block_bytes=CUDA_BLOCK_BYTES if on_cuda else 1))
        run = _Run(cfg, parts, live, mesh)
        run.step(prepared[0])  # makes what later steps find made, such as tables of noise levels
        traces = [run.step(each) for each in prepared]
        live.counts = False
        small, large = (flops for *_, flops in traces[-2:])
        flops = (large - small) / (len(batches[-1]) - len(batches[-2]))
        state = training_state(run.phases, parts.task)
        optimizers = [each.pop("optimizer") for each in state["phases"].values()]
        weights_bytes = _bytes(state)
        return Rehearsed(
            curves=[curves for curves, *_ in traces],
            operations=[operations for _, operations, _ in traces],
            flops=flops,
            update_flops=large - len(batches[-1]) * flops,
            parameters=run.parameters,
            gathered=run.gathered,
            checkpoint_bytes=weights_bytes + _bytes(optimizers),
            weights_bytes=weights_bytes,
            export_bytes=sum(map(_export_bytes, parts.task.exports().values())),
        )


class _Run:
    """A run that is built and bound while its allocations are recorded."""

    def __init__(self, cfg: DictConfig, parts: Parts, live: Live, mesh: DeviceMesh) -> None:
        self._parts, self._live = parts, live
        phases = parts.task.phases()
        roots = [root for phase in phases for root in phase.modules.values()]
        self._met: dict[Tensor, Tensor] = {}
        self.parameters = _counted(parts, phases)
        kept = not cfg.parallel.reshard_after_forward
        self.gathered = sum(_gathered(phase, compute_dtype(cfg), kept=kept) for phase in phases)
        live.label = WEIGHTS
        for root in roots:
            self._take(root)
        live.label = ENCODERS
        self._take_below(parts.task, set())
        live.label = WEIGHTS
        shard(cfg, phases, mesh, OffloadPolicy())
        live.label = AVERAGE
        self.phases = [bind(cfg, phase, parts) for phase in phases]
        live.label = OPTIMIZER
        for bound in self.phases:
            fill_state(bound.optimizer)
        live.label = COPIES
        make_copies(roots)
        reshard(roots)

    def _take(self, module: nn.Module) -> None:
        """Record the tensors of a module, and take the memory from those that have any."""
        for owner in module.modules():
            for tensors in (owner._parameters, owner._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = self._bare(tensor)

    def _bare(self, tensor: Tensor) -> Any:
        """Return a tensor, or one without memory in its place, the same one at each call."""
        if tensor not in self._met:
            bare = tensor if tensor.is_meta else tensor.detach().to(META)
            if isinstance(tensor, nn.Parameter) and bare is not tensor:
                bare = nn.Parameter(bare, tensor.requires_grad)
            self._live.note([bare])
            self._met[tensor] = self._met[bare] = bare
        return self._met[tensor]

    def _take_below(self, owner: Any, seen: set[int]) -> None:
        """Take modules and tensors in the attributes of an object of this library, and of those that it holds."""
        seen.add(id(owner))
        for name, value in list(vars(owner).items()):
            if isinstance(value, nn.Module):
                self._take(value)
            elif isinstance(value, Tensor | dict):
                vars(owner)[name] = tree_map_only(Tensor, self._bare, value)
            elif _is_ours(value) and id(value) not in seen:
                self._take_below(value, seen)

    def step(self, prepared: Any) -> tuple[Curves, Sequence[Any], int]:
        """Take an optimizer step on one micro-batch, as the loop does; return its curves, operations and FLOPs."""
        live = self._live
        live.counts, live.flops, live.label = True, 0, BATCH
        prepared = on_meta(prepared)
        live.note(tensor for tensor in tree_iter(vars(prepared)) if isinstance(tensor, Tensor) and tensor.is_meta)
        begin = live.tick
        for bound in self.phases:
            live.label = ACTIVATIONS
            set_gradient_sync(bound.roots, last=True)
            output = bound.phase.loss(prepared)
            output.loss_B.sum().backward()
            del output
            live.relabel(ACTIVATIONS, GRADIENTS)
            live.label = UPDATE
            bound.clip()
            bound.update(bound.phase.start_step + 1, bound.phase.start_step + 1, torch.zeros((), device=META))
        trace = live.curves(begin), live.operations(begin), live.flops
        live.relabel(UPDATE, OPTIMIZER)  # of algorithms that make their state anew
        return trace


def _counted(parts: Parts, phases: Sequence[Phase]) -> dict[str, tuple[int, int]]:
    """Return how many parameters each module has, and how many of them train."""
    roots = {name: root for phase in phases for name, root in phase.modules.items()}
    modules = parts.stage.frozen_modules() | roots
    return {
        name: (
            sum(p.numel() for p in module.parameters()),
            sum(p.numel() for p in module.parameters() if p.requires_grad),
        )
        for name, module in modules.items()
    }


def _gathered(phase: Phase, dtype: torch.dtype, *, kept: bool) -> int:
    """Return the bytes that FSDP2 gathers at once.

    What lies in no unit, the largest unit twice (the next one is gathered before), or all units where they are kept for
    backward; and the gradients of a unit, which are exchanged in fp32. What is gathered at once takes 8 bytes a number
    that trains, as gradients and as they are sent: the weights are freed by then (measured,
    tests/distributed/test_plan.py).
    """

    def whole(parameters: Iterable[nn.Parameter]) -> int:
        return sum(p.numel() * (dtype.itemsize if p.is_floating_point() else p.element_size()) for p in parameters)

    found = 0
    for name, root in phase.modules.items():
        units = [
            [p for module in unit for p in module.parameters()] for unit in gathered_alone(root, phase.units[name])
        ]
        sizes = [(whole(unit), sum(p.numel() for p in unit if p.requires_grad)) for unit in units]
        rest = whole(root.parameters()) - sum(size for size, _ in sizes)
        doubled = 0 if kept else 2
        largest = max((doubled * size + (dtype.itemsize + 4) * trains for size, trains in sizes), default=0)
        at_once = rest + largest + (sum(size for size, _ in sizes) if kept else 0)
        found += at_once if units else max(rest, 8 * sum(p.numel() for p in root.parameters() if p.requires_grad))
    return found


def _bytes(state: Any) -> int:
    return sum(value.numel() * value.element_size() for value in tree_iter(state) if isinstance(value, Tensor))


def _export_bytes(export: Export) -> int:
    frozen = {n for n, p in export.module.named_parameters() if not p.requires_grad}
    state = export.module.state_dict()
    return _bytes({n: value for n, value in state.items() if export.whole or n not in frozen})


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "cascade_train" and hasattr(value, "__dict__")


@contextmanager
def _fused_on_meta() -> Iterator[None]:
    """Let fused optimizers take tensors without memory."""
    fused = optimizer._get_fused_kernels_supported_devices
    optimizer._get_fused_kernels_supported_devices = lambda: [*fused(), META.type]
    try:
        yield
    finally:
        optimizer._get_fused_kernels_supported_devices = fused


def unloaded(cfg: DictConfig) -> DictConfig:
    """Return a configuration of the same sizes that names no weights, so that nothing is read to build it."""
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
def _kernels(*, on_cuda: bool) -> Iterator[None]:
    """Let dropout and attention keep for backward what they keep on a device."""
    kept = functional.dropout, functional.scaled_dot_product_attention
    functional.dropout = _dropout if on_cuda else kept[0]  # type: ignore[assignment]
    functional.scaled_dot_product_attention = partial(_attention, on_cuda=on_cuda)
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = kept


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Keep a mask of bytes, as on a CUDA device."""
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
