"""Loss on held-out samples at fixed noise levels with fixed noise, so that runs and steps compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cascade_train.batch import Batch
from cascade_train.distributed.parallelize import evaluating
from cascade_train.engine.phase import BoundPhase, averaged
from cascade_train.tasks.base import Task


class Validation:
    """Measures a task on the same held-out batches each time."""

    def __init__(
        self,
        *,
        task: Task,
        phases: Sequence[BoundPhase],
        open_feed: Callable[[], Iterable[list[Batch]]],
        steps: int,
        logsnr: Sequence[float],
        device: torch.device,
    ) -> None:
        """Store.

        Args:
            task: measured through `Task.evaluate`.
            phases: whose roots go into eval mode, and whose averages are measured too.
            open_feed: starts the held-out batches over, the same each time, as many on every rank.
            steps: global batches to measure on.
            logsnr: noise levels, natural logarithm of the signal to noise ratio.
            device: where the task computes.
        """
        self.task = task
        self.phases = phases
        self.open_feed = open_feed
        self.steps = steps
        self.logsnr = logsnr
        self.device = device

    def run(self) -> dict[str, Tensor | float]:
        """Return the mean loss per noise level and over all, of the weights and of their average. Collective."""
        values = self._measure("validate")
        if any(phase.ema is not None for phase in self.phases):
            with averaged(self.phases):
                values |= self._measure("validate_ema")
        return values

    def _measure(self, name: str) -> dict[str, Tensor | float]:
        with evaluating([root for phase in self.phases for root in phase.roots]):
            losses = self._mean_losses().unbind()
        levels = {f"{name}/loss_logsnr_{level:g}": loss for level, loss in zip(self.logsnr, losses, strict=True)}
        return {f"{name}/loss": torch.stack(losses).mean(), **levels}

    def _mean_losses(self) -> Tensor:
        """Return the mean loss of each noise level over the samples that count: those of weight 0 only fill a batch."""
        sums = torch.zeros(len(self.logsnr) + 1, device=self.device)
        for _, micro_batches in zip(range(self.steps), self.open_feed(), strict=False):
            for batch in micro_batches:
                prepared = self.task.prepare_batch(batch)
                weight_B = torch.ones(len(batch)) if batch.weight_B is None else batch.weight_B
                counted_B = (weight_B > 0).to(self.device, torch.float32)
                levels = [(self.task.evaluate(prepared, level) * counted_B).sum() for level in self.logsnr]
                sums += torch.stack([*levels, counted_B.sum()])
        dist.all_reduce(sums)
        return sums[:-1] / sums[-1]
