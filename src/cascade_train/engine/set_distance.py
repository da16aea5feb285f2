"""The distance between two sets of pictures that are seen batch by batch, each rank a part of them.

Shape legend: B batch, C channels, H W image size, D features, S the two sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

Distance = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Maps mean (D,) and covariance (D, D) of one set, and those of the other, to a scalar."""


@dataclass(kw_only=True)
class SetDistance:
    """Gathers the moments of two sets' features in fp64.

    Attributes:
        features: of pictures (B, 3, H, W) float in [0, 1], (B, D).
        distance: of the moments.
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
        """Return the distance of what was added since the last time, on all ranks together. Collective."""
        count, sum_SD, products_SDD = self._sums
        self._sums = []
        for each in (count, sum_SD, products_SDD):
            dist.all_reduce(each)
        mean_SD = sum_SD / count
        outer_SDD = mean_SD[:, :, None] * mean_SD[:, None, :]
        covariance_SDD = (products_SDD - count * outer_SDD) / (count - 1)
        return self.distance(mean_SD[0], covariance_SDD[0], mean_SD[1], covariance_SDD[1])
