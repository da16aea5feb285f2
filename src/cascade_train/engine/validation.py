"""What a task is measured by on held-out samples, the same each time, so that runs and steps compare."""

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
            task: measured through `Task.measures`.
            phases: whose roots go into eval mode, and whose averages are measured too.
            open_feed: starts the held-out batches over, the same each time, as many on every rank.
            steps: global batches to measure on.
            logsnr: noise levels, natural logarithm of the signal to noise ratio, for tasks that denoise.
            device: where the task computes.
        """
        self.task = task
        self.phases = phases
        self.open_feed = open_feed
        self.steps = steps
        self.logsnr = logsnr
        self.device = device

    def run(self) -> dict[str, Tensor | float]:
        """Return the means over the held-out samples, with the weights and with their average. Collective."""
        values = self._measure("validate")
        if any(phase.ema is not None for phase in self.phases):
            with averaged(self.phases):
                values |= self._measure("validate_ema")
        return values

    def _measure(self, name: str) -> dict[str, Tensor | float]:
        with evaluating([root for phase in self.phases for root in phase.roots]):
            return {f"{name}/{measure}": mean for measure, mean in self._means().items()}

    def _means(self) -> dict[str, Tensor]:
        """Return the mean of each measure over the samples that count: those of weight 0 only fill a batch."""
        sums: dict[str, Tensor] = {}
        for _, micro_batches in zip(range(self.steps), self.open_feed(), strict=False):
            for batch in micro_batches:
                weight_B = torch.ones(len(batch)) if batch.weight_B is None else batch.weight_B
                counted_B = (weight_B > 0).to(self.device, torch.float32)
                measures = self.task.measures(self.task.prepare_batch(batch), self.logsnr)
                for measure, value_B in {**measures, "": torch.ones_like(counted_B)}.items():
                    sums[measure] = sums.get(measure, 0.0) + (value_B * counted_B).sum()
        total = torch.stack(list(sums.values()))
        dist.all_reduce(total)
        count = total[list(sums).index("")]
        return {measure: total_of_it / count for measure, total_of_it in zip(sums, total, strict=True) if measure}
