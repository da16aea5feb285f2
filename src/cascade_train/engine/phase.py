"""A task's phase bound to its sharded parameters, optimizer, schedule and average. Only here weights are updated.

Shape legend: G samples of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

from cascade_train.distributed.parallelize import (
    alias_shards,
    evaluating,
    like,
    local,
    reshard,
    settle_gradients,
    shard_of,
    total_norm,
)
from cascade_train.engine.average import Ema, PowerFunctionAverages
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.lr_schedule import LrSchedule
from cascade_train.engine.optimizer import Averaging, Estimating, can_withhold, fill_state, progress, settings
from cascade_train.errors import RunError
from cascade_train.tasks.base import Phase, StepOutput, Task


def divided_in_update(gradient: Tensor) -> bool:
    """Whether a fused optimizer can scale a gradient: in fp32, and on a GPU, where the pass it saves counts."""
    return gradient.dtype == torch.float32 and gradient.is_cuda


def trainable_parameters(phase: Phase) -> dict[str, nn.Parameter]:
    """A phase's trainable parameters by name, prefixed with their root's name."""
    return {n: p for n, p in nn.ModuleDict(phase.modules).named_parameters() if p.requires_grad}


@dataclass(eq=False)
class BoundPhase:
    """One phase of the run: its loss, and the update that follows from it.

    The modules of `phase` are sharded already. `base_lr` is the learning rate before the schedule, `lrs` that of roots
    with their own, by name, and `lr_factor` tells the factor on it of a weight, by name; gradients are scaled down
    above the global norm `max_grad_norm`, None = never. `ema` is swapped in where the phase is looked at, `post_hoc`
    only kept in checkpoints.
    """

    phase: Phase
    _: KW_ONLY
    optimizer: Optimizer
    base_lr: float
    lr_schedule: LrSchedule
    ema: Ema | None
    max_grad_norm: float | None
    lrs: Mapping[str, float] = field(default_factory=dict)
    lr_factor: Callable[[str], float] = field(default=lambda _: 1.0)
    post_hoc: PowerFunctionAverages | None = None

    def __post_init__(self) -> None:
        self.roots = list(self.phase.modules.values())
        self.parameters = trainable_parameters(self.phase)
        self.can_withhold = can_withhold(self.optimizer)
        self._container = nn.ModuleDict(self.phase.modules)
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        ours = {id(p) for p in held}
        self._updated = {name: p if id(p) in ours else shard_of(p) for name, p in self.parameters.items()}
        names = {id(p): name for name, p in self._updated.items()}
        self._names = [names[id(p)] for p in held]
        firsts = [names[id(group["params"][0])] for group in self.optimizer.param_groups]
        roots = (name.partition(".")[0] for name in firsts)
        self._base_lrs = [self.lr_factor(n) * self.lrs.get(r, self.base_lr) for n, r in zip(firsts, roots, strict=True)]
        if self.phase.start_step > 1:
            self._begun = progress(self.optimizer)
            self._was_empty = not self.optimizer.state
            fill_state(self.optimizer)

    def clip(self, step: int = 0, max_steps: int = 0) -> Tensor:
        """Limit the gradients' global norm to `max_grad_norm`; return what it was, () fp32. Collective.

        A fused optimizer may divide them in its update instead, without a pass over memory of its own. Roots that have
        stopped before optimizer step `step` get none, so that no algorithm updates them.
        """
        settle_gradients(self.roots)
        for root in self._stopped(step, max_steps):
            for parameter in self.phase.modules[root].parameters():
                parameter.grad = None
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = total_norm(gradients)
        if self.max_grad_norm is None:
            return norm
        if self.can_withhold and all(divided_in_update(gradient) for gradient in gradients):
            self.optimizer.grad_scale = ((norm + 1e-6) / self.max_grad_norm).clamp(min=1.0)  # type: ignore[attr-defined]
        else:
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]  # of a step before
            scale = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([local(g) for g in gradients], scale)
        return norm

    def update(self, step: int, max_steps: int, withheld: Tensor) -> dict[str, float]:
        """Take optimizer step `step` unless `withheld`, clear the gradients, and return the learning rate, `lr`.

        Where a root has its own, `lr_<root>` too; of an algorithm that estimates a factor on it, their product `d_lr`,
        as it is after the step. `withheld` is () fp32 on the device; 1 = leave weights and optimizer state unchanged,
        where the algorithm `can_withhold`.
        """
        factor = self._lr_factor(step, max_steps)
        for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * factor
        if self.can_withhold:
            device = next(iter(self.parameters.values())).device  # the host where weights are offloaded
            self.optimizer.found_inf = withheld.to(device)  # type: ignore[attr-defined]
        if step == self.phase.start_step and step > 1:
            if self._was_empty:
                self.optimizer.state.clear()  # what `fill_state` put there for the checkpoints before
            for group, begun in zip(self.optimizer.param_groups, self._begun, strict=True):
                parameters, lr = group["params"], group["lr"]
                group.clear()
                group.update(begun, params=parameters, lr=lr)
        running = [each for each in (self.ema, self.post_hoc) if each is not None]
        for each in running:
            each.release()
        alias_shards(zip(self.parameters.values(), self._updated.values(), strict=True))
        self.optimizer.step()
        self.clear_gradients()
        for each in running:
            each.update(step)
            if self.phase.rewritten:
                each.release()
        rates = {"lr": self.base_lr * factor, **{f"lr_{root}": lr * factor for root, lr in self.lrs.items()}}
        rates |= {f"lr_{root}": 0.0 for root in self._stopped(step, max_steps)}
        if isinstance(self.optimizer, Estimating):
            rates["d_lr"] = rates["lr"] * self.optimizer.estimate()
        return rates

    def _stopped(self, step: int, max_steps: int) -> list[str]:
        """Roots that stay as they are at optimizer step `step`."""
        until = self.phase.until.items()
        return [root for root, share in until if step > (share if share >= 1 else max(round(share * max_steps), 1))]

    def _lr_factor(self, step: int, max_steps: int) -> float:
        factor = self.lr_schedule.factor(step, max_steps)
        if not (math.isfinite(factor) and factor >= 0):
            name = type(self.lr_schedule).__name__
            raise RunError(f"{name}.factor({step}, {max_steps}) must be finite and at least 0, and is {factor}.")
        return factor

    def clear_gradients(self) -> None:
        """Free the gradients."""
        for parameter in (*self.parameters.values(), *self._updated.values()):
            parameter.grad = None

    def state_dict(self, *, optimizer: bool = True) -> dict[str, Any]:
        """Weights, optimizer state (where asked for) and average, sharded, for a checkpoint. Collective."""
        reshard(self.roots)
        weights = self._weights()
        state: dict[str, Any] = {"optimizer": self._optimizer_state()} if optimizer else {}
        averages = {name: like(self.parameters[name], value) for name, value in self._averages()}
        if optimizer and averages:
            state["optimizer"]["weights"] = {name: weights[name] for name in averages}
        state["weights"] = {**weights, **averages}
        if self.ema is not None:
            state["ema_updates"] = self.ema.updates
        kept = {"ema": self.ema, "post_hoc": self.post_hoc}
        return state | {name: each.state_dict() for name, each in kept.items() if each is not None}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, except the optimizer's settings: they are the config's. Collective."""
        reshard(self.roots)
        trained = {**state["weights"], **state.get("optimizer", {}).get("weights", {})}
        for name, value in self._weights().items():
            local(value).copy_(local(trained[name]))
        if "optimizer" in state:
            self._load_optimizer(state["optimizer"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
            self.ema.updates = state["ema_updates"]
        if self.post_hoc is not None:
            self.post_hoc.load_state_dict(state["post_hoc"])

    @torch.no_grad()
    def replace_weights(self, values: Mapping[str, Tensor]) -> None:
        """Put this rank's parts of others in the place of the weights and of their average. Collective."""
        reshard(self.roots)
        for name, value in values.items():
            local(self.parameters[name]).copy_(value)
        if self.ema is not None:
            self.ema.load_state_dict(values)

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Swap in the optimizer's own average of the weights for the block; these come back bit for bit."""
        if not isinstance(self.optimizer, Averaging):
            yield
            return
        reshard(self.roots)
        trained = []
        for name, value in self._averages():
            shard = local(self.parameters[name].detach())
            trained.append((shard, shard.clone()))
            shard.copy_(value)
        try:
            yield
        finally:
            reshard(self.roots)
            for shard, value in trained:
                shard.copy_(value)

    def _averages(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and this rank's parts of the optimizer's own average of the weights, if it has one."""
        if isinstance(self.optimizer, Averaging):
            alias_shards(zip(self.parameters.values(), self._updated.values(), strict=True))
            names = {id(p): name for name, p in self._updated.items()}
            for parameter, value in self.optimizer.averages():
                yield names[id(parameter)], value

    def _weights(self) -> dict[str, Tensor]:
        """Trained weights and buffers by name."""
        frozen = {name for name, p in self._container.named_parameters() if not p.requires_grad}
        return {name: value for name, value in self._container.state_dict().items() if name not in frozen}

    def _optimizer_state(self) -> dict[str, Any]:
        """Optimizer's state in the form of torch's `get_optimizer_state_dict`, by names, sharded."""
        if not self.optimizer.state:
            fill_state(self.optimizer)
        saved = self.optimizer.state_dict()
        states = {
            name: {
                key: like(self.parameters[name], value) if isinstance(value, Tensor) and value.ndim > 0 else value
                for key, value in saved["state"][number].items()
            }
            for number, name in enumerate(self._names)
            if number in saved["state"]
        }
        groups = [{**g, "params": [self._names[number] for number in g["params"]]} for g in saved["param_groups"]]
        return {"state": states, "param_groups": groups}

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        configured = settings(self.optimizer)
        numbers = {name: number for number, name in enumerate(self._names)}
        states = {
            numbers[name]: {k: v if self._updated[name] is self.parameters[name] else local(v) for k, v in each.items()}
            for name, each in state["state"].items()
        }
        saved = [(frozenset(numbers[name] for name in g["params"]), g) for g in state["param_groups"]]
        groups = [  # torch pairs parameters by their places; a group divided otherwise goes on as the one of its first
            {**own, **next((g for held, g in saved if own["params"][0] in held), {}), "params": own["params"]}
            for own in self.optimizer.state_dict()["param_groups"]
        ]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        for group, ours in zip(self.optimizer.param_groups, configured, strict=True):
            group.update(ours)
        updated = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, each in states.items():
            own = self.optimizer.state[updated[number]]
            recast = {k: v for k, v in each.items() if isinstance(v, Tensor) and v.dtype != own[k].dtype}
            own |= {k: v.to(own[k].device) for k, v in recast.items()}  # torch gave them the dtype of the weights


def checked_loss(phase: Phase, prepared: Any) -> StepOutput:
    """A phase's loss; a RunError names the function if that is no valid `StepOutput`."""
    output: Any = phase.loss(prepared)
    name = getattr(phase.loss, "__qualname__", f"the loss of phase {phase.name}")
    if not isinstance(output, StepOutput):
        raise RunError(f"{name} must return a StepOutput, and returned a value of type {type(output).__name__}.")
    for key, value in {"loss_B": output.loss_B, **output.report}.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        if len(shape) not in ((1,) if key == "loss_B" else (1, 2)) or shape[0] != len(output.loss_B):
            raise RunError(
                f"{name} must return loss_B (B,), one loss per sample, and reports (B,) or (B, n), and returned {key} "
                f"as a {type(value).__name__} of shape {shape}."
            )
    if torch.is_grad_enabled() and not output.loss_B.requires_grad:
        raise RunError(f"{name} returned a loss that depends on no trained weight: remove detach, no_grad or item.")
    return output


def gather_samples(outputs: Sequence[StepOutput]) -> dict[str, Tensor]:
    """`loss` and reported values of the global batch, (G,) or (G, n), from this rank's outputs. Collective."""
    names = ["loss", *sorted(outputs[0].report)]
    rows = [torch.cat([o.loss_B.detach() if n == "loss" else o.report[n] for o in outputs]).float() for n in names]
    mine = torch.cat([row.reshape(len(row), -1) for row in rows], dim=1)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    parts = torch.cat(every).split([row[0].numel() for row in rows], dim=1)
    return {n: p.reshape(len(p), *row.shape[1:]).contiguous() for n, p, row in zip(names, parts, rows, strict=True)}


def sum_totals(outputs: Sequence[StepOutput]) -> dict[str, Tensor]:
    """Totals of the global batch from the outputs of this rank's micro-batches. Collective."""
    totals = {name: torch.stack([o.totals[name] for o in outputs]).sum(dim=0) for name in sorted(outputs[0].totals)}
    for total in totals.values():
        dist.all_reduce(total)
    return totals


@contextmanager
def averaged(phases: Sequence[BoundPhase]) -> Iterator[None]:
    """Swap in every phase's average for the block."""
    with ExitStack() as stack:
        for phase in phases:
            stack.enter_context(phase.averaging())
            if phase.ema is not None:
                stack.enter_context(phase.ema.swapped(phase.roots))
        yield


@contextmanager
def evaluated(phases: Sequence[BoundPhase]) -> Iterator[None]:
    """Run the block in eval mode, without gradients, with the average of an optimizer that has its own."""
    with ExitStack() as stack:
        for phase in phases:
            stack.enter_context(phase.averaging())
        stack.enter_context(evaluating([root for phase in phases for root in phase.roots]))
        yield


def training_state(phases: Sequence[BoundPhase], task: Task, *, optimizer: bool = True) -> dict[str, Any]:
    """All that training changes, sharded, for a checkpoint; `optimizer`: its state too. Collective."""
    states = {phase.phase.name: phase.state_dict(optimizer=optimizer) for phase in phases}
    return {"phases": states, "task": task.state_dict()}


def restore_training_state(
    store: CheckpointStore, path: Path, phases: Sequence[BoundPhase], task: Task, *, optimizer: bool = True
) -> Any:
    """Load a checkpoint into phases and task, and return its facts. Collective. See `CheckpointStore.load`."""
    state = training_state(phases, task, optimizer=optimizer)
    facts = store.load(path, state, optimizer=optimizer)
    for phase in phases:
        phase.load_state_dict(state["phases"][phase.phase.name])
    task.load_state_dict(state["task"])
    return facts


def whole_state(module: nn.Module, *, frozen: bool = False) -> dict[str, Tensor]:
    """A module's trained weights and buffers, gathered from their shards, on the host of rank 0. Collective.

    Frozen weights are left out unless asked for; on other ranks the result is empty.
    """
    reshard([module])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=not frozen)
    return cast("dict[str, Tensor]", get_model_state_dict(module, options=options))
