"""The memory of one rank, by label, for any micro-batch size and number of ranks, from traced steps.

After each operation of a step, memory is affine in the micro-batch: the operations are the same, and each makes tensors
with or without a batch dimension. Two traced sizes therefore give it for all sizes, and its peak.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from cascade_train.assembly.cache_identity import take_cache
from cascade_train.assembly.components import Parts, build_component, build_parts
from cascade_train.assembly.planning.devices import CONTEXT_BYTES, Budget
from cascade_train.assembly.planning.memory_trace import (
    ACTIVATIONS,
    AVERAGE,
    BATCH,
    COPIES,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    Curves,
    MemoryTrace,
    trace_steps,
    unloaded,
)
from cascade_train.batch import Batch
from cascade_train.config.saved import to_plain
from cascade_train.config.targets import class_constant
from cascade_train.data.cached import Cached
from cascade_train.data.data_set import open_data_set
from cascade_train.distributed.parallelize import FITS_SHARE
from cascade_train.filters.base import CONTROL
from cascade_train.tasks.controlnet import ControlNet

SIZES = (2, 3)
"""Micro-batches that are traced: a batch of 1 would take other ways through some operations."""

_TRACED: dict[str, tuple[Memory, MemoryTrace]] = {}
"""Traces of this process by configuration: a choice and a sweep repeat them."""

STATE = (WEIGHTS, GRADIENTS, OPTIMIZER, AVERAGE)
"""What is split where weights are."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank in a step.

    Attributes:
        fixed: after each operation, (T,) by label, whatever the micro-batch.
        each: the same for each sample of the micro-batch.
        ranks: over how many weights are split.
        gathered: bytes that a rank gathers at once where they are.
        on_host: labels in host memory.
        copies: bytes in host memory of what is saved beside the loop, of all ranks until `over_ranks` divides them.
        context: bytes beside all tensors.
    """

    fixed: Mapping[str, np.ndarray]
    each: Mapping[str, np.ndarray]
    ranks: int = 1
    gathered: int = 0
    on_host: frozenset[str] = frozenset()
    copies: int = 0
    context: int = CONTEXT_BYTES

    def over(self, ranks: int) -> Memory:
        """Memory of a rank that gathers weights, from others or from the host."""
        if ranks == 1 and WEIGHTS not in self.on_host:
            return self
        fixed = {name: curve / ranks if name in STATE else curve for name, curve in self.fixed.items()}
        fixed[COPIES] = np.full_like(fixed[ACTIVATIONS], self.gathered)
        each = {**self.each, COPIES: np.zeros_like(fixed[COPIES])}
        return dataclasses.replace(self, fixed=fixed, each=each, ranks=ranks)

    def peak(self, micro_batch_size: int, accumulated: int = 1) -> dict[str, int]:
        """Bytes at the moment that needs the most device memory, by what they are for.

        With `accumulated` micro-batches, the next one is prepared meanwhile, and gradients of one wait for it.
        """
        fixed, waiting = self.fixed, 0
        if accumulated > 1:
            fixed = {**fixed, GRADIENTS: np.full_like(fixed[GRADIENTS], fixed[GRADIENTS].max())}
            waiting = micro_batch_size  # samples of the next one
        device = [name for name in fixed if name not in self.on_host]
        curves = {name: fixed[name] + micro_batch_size * self.each[name] for name in device}
        curves[BATCH] = curves[BATCH] + waiting * self.each[BATCH].max()
        moment = int(sum(curves.values()).argmax())
        labels = {name: round(float(curve[moment])) for name, curve in curves.items()}
        return {**labels, "context": self.context} if self.context else labels

    def total(self, micro_batch_size: int, accumulated: int = 1) -> int:
        """Bytes of the peak."""
        return sum(self.peak(micro_batch_size, accumulated).values())

    def host_bytes(self) -> int:
        """Bytes of what lies in host memory, and of copies for saves."""
        return self.copies + round(sum(float(self.fixed[name].max()) for name in self.on_host if name in self.fixed))

    def largest(self, limit_bytes: float, sizes: Sequence[int], samples: int) -> int | None:
        """Largest of some micro-batch sizes, which rise, whose peak is within a limit; None = none is.

        `samples` are those of the rank in a step.
        """
        # two ranges, since without accumulation no gradients wait: a larger micro-batch may need less
        several = bisect.bisect_right(sizes, samples // 2)
        for first, last in ((several, len(sizes)), (0, several)):
            fits = bisect.bisect_right(
                sizes, limit_bytes, first, last, key=lambda size: self.total(size, max(1, samples // size))
            )
            if fits > first:
                return sizes[fits - 1]
        return None


def layout_of(cfg: DictConfig, budget: Budget) -> Memory:
    """Memory of a rank of a checked configuration, over the ranks of a budget."""
    memory, _ = memory_of(cfg, on_cuda=budget.on_cuda)
    device_gb = budget.gb if budget.on_cuda else math.inf  # it decides the mode, not what a user asks for
    return over_ranks(cfg, memory, budget.ranks, machine_ranks=budget.machine_ranks, device_gb=device_gb)


def over_ranks(cfg: DictConfig, memory: Memory, ranks: int, *, machine_ranks: int, device_gb: float) -> Memory:
    """A rank's memory when the run's mode shards the weights over this many ranks."""
    mode, memory = cfg.parallel.mode.value, dataclasses.replace(memory, copies=-(-memory.copies // ranks))
    if cfg.parallel.cpu_offload and (mode in ("single", "ddp") or ranks == 1):
        return memory.over(1)
    if mode == "hsdp":
        return memory.over(min(ranks, cfg.parallel.shard_size or machine_ranks))
    state = (WEIGHTS, COPIES, GRADIENTS, OPTIMIZER)
    whole = sum(float(memory.fixed[part].max()) for part in state if part in memory.fixed)
    fits = whole <= FITS_SHARE * device_gb * 1e9
    if mode == "fsdp" or (mode == "auto" and not fits):
        return memory.over(ranks)
    is_sent = ranks > 1 and cfg.train.master_weights.value == "bf16" and not cfg.parallel.cpu_offload
    sent = {GRADIENTS: 2 * memory.fixed[GRADIENTS]} if is_sent else {}  # whole gradients are exchanged in fp32
    return dataclasses.replace(memory, fixed={**memory.fixed, **sent}).over(1)


def memory_of(cfg: DictConfig, *, on_cuda: bool = True) -> tuple[Memory, MemoryTrace]:
    """Trace a checked configuration; return the memory of a single rank, and the trace."""
    bare = unloaded(cfg)
    is_cached = class_constant(cfg.data._target_, "is_cache")
    plain = to_plain(bare)
    plain["parallel"] = plain["parallel"]["reshard_after_forward"]  # all else of it leaves a trace as it is
    plain["memory"] = plain["train"]["micro_batch_size"] = None
    key = json.dumps([on_cuda, plain], default=str)
    if key not in _TRACED:
        parts = build_parts(bare)
        batches = cached_batches(cfg, parts, SIZES) if is_cached else [blank_batch(bare, parts, n) for n in SIZES]
        trace = trace_steps(bare, parts, batches, on_cuda=on_cuda)
        _TRACED[key] = between(trace, sizes=SIZES), trace
    memory, trace = _TRACED[key]
    on_host, fixed = set(STATE) if cfg.parallel.cpu_offload else set[str](), memory.fixed
    if cfg.ema.device is not None and not on_host and AVERAGE in fixed:
        on_host = {AVERAGE}
        fixed = {**fixed, AVERAGE: fixed[AVERAGE] * _with_weights(cfg)}
    copies = trace.checkpoint_bytes if cfg.checkpoint.asynchronous else 0
    context, host = CONTEXT_BYTES if on_cuda else 0, frozenset(on_host)
    whole = Memory(fixed=fixed, each=memory.each, gathered=trace.gathered, on_host=host, copies=copies, context=context)
    return whole, trace


def _with_weights(cfg: DictConfig) -> float:
    """Factor by which averages on the host grow with the copies of weights that update them.

    `ema` and `post_hoc` have one each, of the size of an average.
    """
    averages = [count for count in (int(cfg.ema.decay is not None), len(cfg.ema.post_hoc or ())) if count]
    return 1.0 + len(averages) / sum(averages)


def changed(cfg: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Copy of a configuration with other values, nodes as a whole."""
    cfg = cfg.copy()
    for key, value in values.items():
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    return cfg


def divisors(count: int) -> list[int]:
    """Numbers that divide another, the smallest first."""
    return [size for size in range(1, count + 1) if count % size == 0]


def blank_batch(cfg: DictConfig, parts: Parts, size: int) -> Batch:
    """A batch of blank samples of the largest shape, whose draws need the most memory."""
    source = build_component(cfg, "data")
    height, width = max(source.bucket_table(None).sizes_K2.tolist(), key=lambda each: each[0] * each[1])
    tensors: dict[str, Tensor] = {}
    if isinstance(parts.task, ControlNet):
        of_images = parts.task.bottleneck in ("effnet", "small")
        sides = (height, width) if of_images else parts.stage.latent_shape(height, width)[1:]
        tensors[CONTROL] = torch.zeros(size, parts.task.filter.channels, *sides)
    return WorstCaseBatch(
        image_BCHW=torch.zeros(size, 3, height, width, dtype=torch.uint8),
        captions=("a caption",) * size,
        keys=tuple(map(str, range(size))),
        epoch_B=torch.zeros(size, dtype=torch.int64),
        index_B=torch.arange(size),
        seed=0,
        tensors=tensors,
    )


def cached_batches(cfg: DictConfig, parts: Parts, sizes: Sequence[int]) -> list[Batch]:
    """Batches of a cache; `parts`, which are not built yet, will read from it."""
    data = open_data_set(build_component(cfg, "data"), share=None, held_out=None)
    take_cache(to_plain(cfg), parts.stage, parts.task, cast("Cached", data.training.source))
    return [WorstCaseBatch(**vars(data.shown_batch(size, seed=cfg.run.seed))) for size in sizes]


class WorstCaseBatch(Batch):
    """A batch whose draws take the most memory: every image is a condition, and none shrinks."""

    def uniform(self, purpose: str) -> Tensor:
        """End of [0, 1) that takes more memory, (B,)."""
        return torch.full((len(self),), 1.0 - 1e-6 if purpose == "shrink" else 0.0)


def between(trace: MemoryTrace, *, sizes: tuple[int, int]) -> Memory:
    """Memory that follows from two micro-batches, by the moments that both have.

    All of them, unless something is done sample by sample: then those before and after it, and its peak.
    """
    first, second = trace.operations
    before = _shared_prefix(first, second)
    after = _shared_prefix(first[before:][::-1], second[before:][::-1])
    is_in_both = min(len(first), len(second)) > before + after
    small, large = (_joined(curves, before, after, peak=is_in_both) for curves in trace.curves)
    names = list(dict.fromkeys([*small, *large]))
    none = np.zeros_like(next(iter(small.values())))
    step = sizes[1] - sizes[0]
    each = {name: (large.get(name, none) - small.get(name, none)) / step for name in names}
    fixed = {name: small.get(name, none) - sizes[0] * each[name] for name in names}
    return Memory(fixed=fixed, each=each)


def _shared_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], zip(first, second, strict=False)))


def _joined(curves: Curves, before: int, after: int, *, peak: bool) -> Curves:
    """First and last moments of curves, and the one between them that needs the most."""
    end = len(next(iter(curves.values()))) - after
    needed = np.sum(list(curves.values()), axis=0)[before:end]
    middle = [before + int(needed.argmax())] if peak else []
    moments = [*range(before), *middle, *range(end, end + after)]
    return {name: curve[moments] for name, curve in curves.items()}
