"""Measures of a task on held-out samples, the same each time, so that runs and steps compare.

The loss is that of training, weighted and at the noise levels that training draws, with random choices that stay.

Shape legend: B batch, C channels, H W image size, D features, S the two sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from cascade_train.batch import Batch
from cascade_train.engine.phase import BoundPhase, averaged, evaluated
from cascade_train.tasks.base import ImageSampler, Task

LOSS, LOSS_RAW = "loss", "loss_raw"
"""The weighted loss, which is told apart by source, and the unweighted one, as in training."""

Distance = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Maps mean (D,) and covariance (D, D) of one set, and those of the other, to a scalar."""


@dataclass(kw_only=True)
class SetDistance:
    """The distance between two sets of pictures, from the moments of their features in fp64, summed batch by batch.

    `features` maps pictures (B, 3, H, W) float in [0, 1] to (B, D).
    """

    features: Callable[[Tensor], Tensor]
    distance: Distance
    _sums: list[Tensor] = field(default_factory=list)

    def add(self, image_BCHW: Tensor, original_BCHW: Tensor, counted_B: Tensor) -> None:
        """Add pairs of pictures, those whose `counted_B` (B,) is 1; 0 = it only fills a batch."""
        features_SBD = torch.stack([self.features(each) for each in (image_BCHW, original_BCHW)]).double()
        weighted_SBD = features_SBD * counted_B[:, None]
        found = [counted_B.double().sum(), weighted_SBD.sum(dim=1), weighted_SBD.mT @ features_SBD]
        self._sums = [a + b for a, b in zip(self._sums, found, strict=True)] if self._sums else found

    def take(self) -> Tensor:
        """Distance of what was added since the last time, on all ranks together. Collective."""
        count, sum_SD, products_SDD = self._sums
        self._sums = []
        for each in (count, sum_SD, products_SDD):
            dist.all_reduce(each)
        mean_SD = sum_SD / count
        outer_SDD = mean_SD[:, :, None] * mean_SD[:, None, :]
        covariance_SDD = (products_SDD - count * outer_SDD) / (count - 1)
        return self.distance(mean_SD[0], covariance_SDD[0], mean_SD[1], covariance_SDD[1])


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out batches, the same each time: `steps` global batches; `open` starts them over.

    `parts` are the names of the sources that the data joins, none = one source alone; `part_of` maps the index of a
    sample to the number of its source.
    """

    open: Callable[[], Iterable[list[Batch]]]
    steps: int
    parts: Sequence[str] = ()
    part_of: Callable[[int], int] = lambda index: 0

    def masks(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        """Which samples of a micro-batch came from each part, (B,) fp32 of 0 and 1 each."""
        if not self.parts:
            return {}
        place_B = torch.tensor([self.part_of(index) for index in batch.index_B.tolist()]).to(device)
        return {part: (place_B == place).float() for place, part in enumerate(self.parts)}


@dataclass(frozen=True, kw_only=True)
class Reconstructions:
    """Reconstructions of held-out images, each from noise of its own.

    `image_sampler` maps height and width in pixels to a sampler of that size; `compare` maps reconstructions and
    originals, (B, 3, H, W) fp32 in [0, 1], to measures, (B,) fp32 each; `rfid` is measured between all of them, None =
    not at all.
    """

    held_out: HeldOut
    image_sampler: Callable[[Sequence[int]], ImageSampler]
    compare: Callable[[Tensor, Tensor], Mapping[str, Tensor]]
    rfid: SetDistance | None = None

    def measures(self, batch: Batch, device: torch.device) -> Mapping[str, Tensor]:
        """Measures of a micro-batch's reconstructions by name, (B,) fp32 each."""
        if batch.image_BCHW is None:
            raise AssertionError("a stage that reconstructs takes no cache")
        image_BCHW = batch.image_BCHW.to(device).float() / 255
        sampled_BCHW = self.image_sampler(image_BCHW.shape[-2:]).sample(batch.captions, image_BCHW, batch.generators)
        if self.rfid is not None:
            self.rfid.add(sampled_BCHW, image_BCHW, counted_samples(batch, device))
        return self.compare(sampled_BCHW, image_BCHW)


def counted_samples(batch: Batch, device: torch.device) -> Tensor:
    """Which samples count, (B,) fp32 of 0 and 1: those of weight 0 only fill a batch."""
    if batch.weight_B is None:
        return torch.ones(len(batch), device=device)
    return (batch.weight_B > 0).to(device, torch.float32, non_blocking=True)


@dataclass(kw_only=True)
class Validation:
    """Measures a task on the same held-out batches each time, with the weights of its phases and with their averages.

    `logsnr` are noise levels, natural logarithm of the signal-to-noise ratio, of the curve of a task that denoises.
    """

    task: Task
    phases: Sequence[BoundPhase]
    held_out: HeldOut
    logsnr: Sequence[float]
    device: torch.device
    reconstructions: Reconstructions | None = None

    def run(self, *, curve: bool = True) -> dict[str, Tensor | float]:
        """Means over the held-out samples, with the weights and with their average. Collective.

        `curve`: the losses at the fixed noise levels too.
        """
        logsnr = self.logsnr if curve else ()
        values = self._measure("validate", logsnr)
        if any(phase.ema is not None for phase in self.phases):
            with averaged(self.phases):
                values |= self._measure("validate_ema", logsnr)
        return values

    def _measure(self, name: str, logsnr: Sequence[float]) -> dict[str, Tensor | float]:
        def measures(batch: Batch) -> Mapping[str, Tensor]:
            prepared = self.task.prepare_batch(batch)
            output = self.phases[0].phase.loss(prepared)
            losses = {LOSS: output.loss_B} | {n: v for n, v in output.report.items() if n == LOSS_RAW}
            return losses | {**self.task.measures(prepared, logsnr)} | losses

        with evaluated(self.phases):
            means = self._means(self.held_out, measures)
            again = self.reconstructions
            if again is not None:
                means |= self._means(again.held_out, lambda batch: again.measures(batch, self.device))
                means |= {} if again.rfid is None else {"rfid": again.rfid.take()}
            return {f"{name}/{measure}": mean for measure, mean in means.items()}

    def _means(self, held_out: HeldOut, measure_of: Callable[[Batch], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Means over all samples by measure, and each part's loss as `<part>/loss`; NaN = no sample."""
        sums: dict[tuple[str, str], Tensor] = {}
        for _, micro_batches in zip(range(held_out.steps), held_out.open(), strict=False):
            for batch in micro_batches:
                counted_B = counted_samples(batch, self.device)
                measures = {**measure_of(batch), "": torch.ones_like(counted_B)}
                for part, mask_B in {"": counted_B, **held_out.masks(batch, self.device)}.items():
                    for measure in [each for each in measures if not part or each in (LOSS, "")]:
                        found = (measures[measure] * mask_B * counted_B).sum()
                        sums[part, measure] = sums.get((part, measure), 0.0) + found
        total = torch.stack(list(sums.values()))
        dist.all_reduce(total)
        totals = dict(zip(sums, total, strict=True))
        means = {key: total_of_it / totals[key[0], ""] for key, total_of_it in totals.items() if key[1]}
        return {f"{part}/{measure}" if part else measure: mean for (part, measure), mean in means.items()}
