"""Two sources as one: your pictures, and regularisation pictures that count with a weight of their own.

The loss of the second is what DreamBooth calls prior preservation (Ruiz et al. 2022, equation 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cascade_train.data.captions import Captions
from cascade_train.data.index import ROW_FIELDS, Index
from cascade_train.data.sample import RawSample
from cascade_train.data.source import Source


@dataclass(kw_only=True)
class Regularised(Source):
    """A source mixed with a second one. Crop and workers are this source's; theirs are not used.

    One epoch holds the smaller side as often as it takes to come closest to the share; each time a picture comes it
    is another sample, with draws of its own. All shards of both are mixed with each other, so that every batch holds
    about the share, however the two are cut into shards.

    Attributes:
        source: what is to be learned.
        regularisation: what is not to be forgotten.
        share: of the regularisation samples among all, between 0 and 1.
        weight: of a regularisation sample's loss, above 0; the others have 1.
    """

    source: Source
    regularisation: Source
    share: float
    weight: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"data.share={self.share} must lie between 0 and 1: it is the regularisation's part")
        if self.weight <= 0.0:
            raise ValueError(f"data.weight={self.weight} must be above 0: it multiplies the regularisation's loss")
        if not self.captions.changes_nothing:
            raise ValueError(
                "data.captions belongs to each of the two sources here: set data.source.captions and"
                " data.regularisation.captions"
            )
        for key, part in (("source", self.source), ("regularisation", self.regularisation)):
            if part.image_size != self.image_size:
                raise ValueError(
                    f"data.{key}.image_size={part.image_size} differs from data.image_size={self.image_size}: "
                    "both follow model.image_size, leave them out"
                )
        self._ends = np.zeros(0, dtype=np.int64)
        self._own_times = 0

    def open(self) -> Index:
        """Open both and return one index, in which the smaller side is repeated."""
        own, other = self.source.open(), self.regularisation.open()
        self._own_times = self._times(len(own), len(other), 1 - self.share)
        parts = [own] * self._own_times + [other] * self._times(len(other), len(own), self.share)
        self._ends = np.cumsum([len(part) for part in parts])
        table = np.zeros(self._ends[-1], dtype=ROW_FIELDS)
        for name in ("width", "height"):
            table[name] = np.concatenate([part.table[name] for part in parts])
        names = [[part.name(row).encode() for row in range(len(part))] for part in (own, other)]
        keys = names[0] * self._own_times + names[1] * (len(parts) - self._own_times)
        filters = " ".join(part.filters for part in (own, other) if part.filters)
        return Index(shards=("regularised",), table=table, keys=np.array(keys), filters=filters)

    @staticmethod
    def _times(count: int, others: int, share: float) -> int:
        """Return how often `count` samples come beside `others` to be `share` of all: once, unless they are too few."""
        return max(1, round(others * share / (1 - share) / count))

    def read(self, row: int) -> RawSample:
        """Read one row of the side that it belongs to."""
        side, side_row = self._side(row)
        raw = side.read(side_row)
        return raw if side is self.source else replace(raw, weight=self.weight)

    def captions_of(self, row: int) -> Captions:
        """Return what makes the captions of the side that the row belongs to."""
        side, side_row = self._side(row)
        return side.captions_of(side_row)

    def _side(self, row: int) -> tuple[Source, int]:
        """Return which of the two a row belongs to, and its row there."""
        part = int(np.searchsorted(self._ends, row, side="right"))
        side = self.source if part < self._own_times else self.regularisation
        return side, row - (int(self._ends[part - 1]) if part else 0)
