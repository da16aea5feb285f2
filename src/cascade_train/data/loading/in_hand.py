"""Samples of streams that are in memory, as a source whose rows they are, so that they are decoded like all others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.data.sample import RawSample
from cascade_train.data.source import Source
from cascade_train.data.stream import Held
from cascade_train.data.tar.sample import raw_sample


@dataclass(frozen=True, eq=False, kw_only=True)
class _Names(Index):
    held: Mapping[int, Held]

    def name(self, row: int) -> str:
        return self.held[row].key


@dataclass(kw_only=True)
class InHand(Source):
    """Samples by their numbers, with the options of the source that they came from.

    Attributes:
        held: the samples.
    """

    held: Mapping[int, Held]

    @classmethod
    def of(cls, source: Source, samples: Sequence[Held]) -> InHand:
        """Take some samples of a source in hand."""
        options = {field.name: getattr(source, field.name) for field in dataclasses.fields(Source)}
        return cls(**options, held={each.number: each for each in samples})

    def open(self) -> Index:
        """Return what names the samples; it has no rows."""
        return _Names(shards=(), table=np.empty(0, dtype=ROW_FIELDS), keys=np.empty(0, dtype="S1"), held=self.held)

    @property
    def rows(self) -> np.ndarray:
        """(N,) int64, the samples' numbers, sorted."""
        return np.array(sorted(self.held), dtype=np.int64)

    def read(self, row: int) -> RawSample:
        """Return a sample.

        Raises:
            UnreadableSampleError: a part of it is larger than is read.
        """
        each = self.held[row]
        for part, content in each.parts.items():
            self.limits.check(part, len(content))
        return raw_sample(each.parts, each.key, needs_values=self.captions.needs_values)
