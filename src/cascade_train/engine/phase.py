"""A task's phase bound to its sharded parameters, optimizer, schedule and average. Only here weights are updated.

Shape legend: G samples of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from cascade_train.distributed.parallelize import like, local, reshard, settle_gradients
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.lr_schedule import LrSchedule
from cascade_train.engine.optimizer import can_withhold, fill_state, settings
from cascade_train.tasks.base import Phase, StepOutput, Task

_SHARDED = StateDictOptions(ignore_frozen_params=True)


def trainable_parameters(phase: Phase) -> dict[str, nn.Parameter]:
    """Return a phase's trainable parameters by name, prefixed with their root's name."""
    return {n: p for n, p in nn.ModuleDict(phase.modules).named_parameters() if p.requires_grad}


@dataclass(eq=False)
class BoundPhase:
    """One phase of the run: its loss, and the update that follows from it.

    Attributes:
        phase: the task's phase; its modules are sharded already.
        optimizer: over the phase's trainable parameters.
        base_lr: learning rate before the schedule.
        lr_schedule: factor by optimizer step.
        ema: average of the phase's weights, or None.
        max_grad_norm: global gradient norm above which gradients are scaled down; None = off.
    """

    phase: Phase
    _: KW_ONLY
    optimizer: Optimizer
    base_lr: float
    lr_schedule: LrSchedule
    ema: Ema | None
    max_grad_norm: float | None

    def __post_init__(self) -> None:
        self.roots = list(self.phase.modules.values())
        self.parameters = trainable_parameters(self.phase)
        self.can_withhold = can_withhold(self.optimizer)
        self._container = nn.ModuleDict(self.phase.modules)
        if self.phase.start_step > 1:
            fill_state(self._container, self.optimizer)

    def clip(self) -> Tensor:
        """Scale the gradients to at most `max_grad_norm`; return their true global norm, () fp32. Collective."""
        settle_gradients(self.roots)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.max_grad_norm is not None:
            scale = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            # On each rank's own part: DTensor would plan this for every gradient, seconds before the first update.
            torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], scale)
        return norm

    def update(self, step: int, max_steps: int, withheld: Tensor) -> float:
        """Take optimizer step `step` unless `withheld`, clear the gradients, and return the learning rate.

        `withheld` is () fp32 on the device; 1 = leave weights and optimizer state unchanged.
        """
        lr = self.base_lr * self.lr_schedule.factor(step, max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.can_withhold:
            device = next(iter(self.parameters.values())).device  # the host where weights are offloaded
            self.optimizer.found_inf = withheld.to(device)  # type: ignore[attr-defined]
        if step == self.phase.start_step and step > 1:
            self.optimizer.state.clear()  # what `fill_state` put there for the checkpoints before
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(step)
        return lr

    def state_dict(self, *, optimizer: bool = True) -> dict[str, Any]:
        """Return weights, optimizer state (where asked for) and average, sharded, for a checkpoint. Collective."""
        reshard(self.roots)
        state: dict[str, Any] = {"weights": get_model_state_dict(self._container, options=_SHARDED)}
        if optimizer:
            state["optimizer"] = get_optimizer_state_dict(self._container, self.optimizer, options=_SHARDED)
        return state if self.ema is None else {**state, "ema": self.ema.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, except the optimizer's settings: they are the config's. Collective."""
        reshard(self.roots)
        not_frozen = StateDictOptions(ignore_frozen_params=True, strict=False)
        set_model_state_dict(self._container, state["weights"], options=not_frozen)
        if "optimizer" in state:
            configured = settings(self.optimizer)
            set_optimizer_state_dict(self._container, self.optimizer, state["optimizer"], options=_SHARDED)
            for group, ours in zip(self.optimizer.param_groups, configured, strict=True):
                group.update(ours)
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])


def gather_samples(outputs: Sequence[StepOutput]) -> dict[str, Tensor]:
    """Return `loss` and reported values of the global batch, (G,) or (G, n), from this rank's outputs. Collective."""
    names = ["loss", *sorted(outputs[0].report)]
    rows = [torch.cat([o.loss_B.detach() if n == "loss" else o.report[n] for o in outputs]).float() for n in names]
    mine = torch.cat([row.reshape(len(row), -1) for row in rows], dim=1)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    parts = torch.cat(every).split([row[0].numel() for row in rows], dim=1)
    return {n: p.reshape(len(p), *row.shape[1:]).contiguous() for n, p, row in zip(names, parts, rows, strict=True)}


def sum_totals(outputs: Sequence[StepOutput]) -> dict[str, Tensor]:
    """Return the totals of the global batch from the outputs of this rank's micro-batches. Collective."""
    totals = {name: torch.stack([o.totals[name] for o in outputs]).sum(dim=0) for name in sorted(outputs[0].totals)}
    for total in totals.values():
        dist.all_reduce(total)
    return totals


class Ema:
    """A running average in fp32 of named parameters.

    ema <- decay * ema + (1 - decay) * weights, every `every_steps` optimizer steps; before `start_step` the
    average is a plain copy (Stable Cascade, train/base.py, which counts micro-batches instead).

    Args:
        parameters: the trainable parameters, by name, already sharded; their shards are copied.
        decay: in [0, 1).
        start_step: first optimizer step at which the average is more than a copy.
        every_steps: optimizer steps between updates.
        device: where the average lives; None = beside the weights.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        decay: float,
        start_step: int,
        every_steps: int,
        device: torch.device | None,
    ) -> None:
        self.decay = decay
        self.start_step = start_step
        self.every_steps = every_steps
        self._parameters = dict(parameters)
        self._average = {
            name: local(p.detach()).to(device=device or p.device, dtype=torch.float32, copy=True)
            for name, p in parameters.items()
        }

    def start_from(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Start from given names and whole, unsharded values instead; those that are not averaged are ignored.

        Raises:
            AssertionError: a parameter is not among them.
        """
        missing = set(self._average)
        for name, value in values:
            if name in missing:
                missing.remove(name)
                self._average[name].copy_(_own_shard(self._parameters[name], value))
        if missing:
            raise AssertionError(f"no value to start from for {', '.join(sorted(missing)[:5])}")

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after optimizer step `step`."""
        if step % self.every_steps:
            return
        averages = list(self._average.values())
        weights = [
            local(p.detach()).to(device=a.device, dtype=torch.float32)
            for a, p in zip(averages, self._parameters.values(), strict=True)
        ]
        weight = 1.0 if step < self.start_step else 1.0 - self.decay
        torch._foreach_lerp_(averages, weights, weight)

    @contextmanager
    def swapped(self, roots: Sequence[nn.Module]) -> Iterator[None]:
        """Swap weights and average for the block; both are restored bit for bit."""
        self._swap(roots)
        try:
            yield
        finally:
            self._swap(roots)

    @torch.no_grad()
    def _swap(self, roots: Sequence[nn.Module]) -> None:
        reshard(roots)
        for name, parameter in self._parameters.items():
            shard, average = local(parameter.detach()), self._average[name]
            kept = shard.to(device=average.device, dtype=average.dtype, copy=True)
            shard.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average by parameter name, sharded like the parameters."""
        return {name: like(p, self._average[name].to(p.device)) for name, p in self._parameters.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        for name, average in self._average.items():
            average.copy_(local(state[name]))


def _own_shard(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor that every rank has, without communication."""
    if not isinstance(parameter, DTensor):
        return value
    whole = value.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


@contextmanager
def averaged(phases: Sequence[BoundPhase]) -> Iterator[None]:
    """Run the block with every phase's average in its weights' place."""
    with ExitStack() as stack:
        for phase in phases:
            if phase.ema is not None:
                stack.enter_context(phase.ema.swapped(phase.roots))
        yield


def training_state(phases: Sequence[BoundPhase], task: Task, *, optimizer: bool = True) -> dict[str, Any]:
    """Return all that training changes, sharded, for a checkpoint; `optimizer`: its state too. Collective."""
    states = {phase.phase.name: phase.state_dict(optimizer=optimizer) for phase in phases}
    return {"phases": states, "task": task.state_dict()}


def restore_training_state(
    store: CheckpointStore, path: Path, phases: Sequence[BoundPhase], task: Task, *, optimizer: bool = True
) -> Any:
    """Load a checkpoint into phases and task, and return its facts. Collective.

    `optimizer`: the optimizers' state too, which only training needs.

    Raises:
        ConfigError: the checkpoint is of another model, or has no optimizer state any more.
    """
    state = training_state(phases, task, optimizer=optimizer)
    facts = store.load(path, state, optimizer=optimizer)
    for phase in phases:
        phase.load_state_dict(state["phases"][phase.phase.name])
    task.load_state_dict(state["task"])
    return facts


def whole_state(module: nn.Module, *, frozen: bool = False) -> dict[str, Tensor]:
    """Return a module's trained weights and buffers, gathered from their shards, on the host of rank 0. Collective.

    Frozen weights are left out unless asked for; on other ranks the result is empty.
    """
    reshard([module])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=not frozen)
    return cast("dict[str, Tensor]", get_model_state_dict(module, options=options))
