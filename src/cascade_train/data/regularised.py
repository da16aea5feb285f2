"""Two sources as one: your pictures, and regularisation pictures that count with a weight of their own.

The loss of the second is what DreamBooth calls prior preservation (Ruiz et al. 2022, equation 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cascade_train.data.index.rows import Index
from cascade_train.data.joined import JoinedSource, Part
from cascade_train.data.source import Source
from cascade_train.options import Order


@dataclass(kw_only=True)
class Regularised(JoinedSource):
    """A source mixed with a second one. Crop and workers are this source's; theirs are not used.

    One epoch holds the smaller side as often as it takes to come closest to the share; each time a picture comes it
    is another sample, with draws of its own. All shards of both are mixed with each other, so that every batch holds
    about the share, however the two are cut into shards.
    """

    source: Source
    regularisation: Source
    share: Order[float]
    weight: float

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"data.share={self.share} must lie between 0 and 1: it is the regularisation's part")
        if self.weight <= 0.0:
            raise ValueError(f"data.weight={self.weight} must be above 0: it multiplies the regularisation's loss")
        super().__post_init__()

    def joined(self) -> dict[str, Source]:
        """See `JoinedSource.joined`."""
        return {"source": self.source, "regularisation": self.regularisation}

    def open(self) -> Index:
        """Open both and return one index, in which the smaller side is repeated."""
        own, other = Part.opened(self.source), Part.opened(self.regularisation)
        times = _times(len(own.rows), len(other.rows), 1 - self.share)
        other_times = _times(len(other.rows), len(own.rows), self.share)
        own = replace(own, rows=np.tile(own.rows, times))
        other = replace(other, rows=np.tile(other.rows, other_times), weight=self.weight)
        return self._join([own, other], "regularised")


def _times(count: int, others: int, share: float) -> int:
    """Return how often `count` samples come beside `others` to be `share` of all: once, unless they are too few."""
    return max(1, round(others * share / (1 - share) / count))
