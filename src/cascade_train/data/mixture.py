"""Any number of sources as one, each as often as you say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cascade_train.data.index.rows import Index, repeat_counts, repeated_rows
from cascade_train.data.joined import JoinedSource, Part
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError
from cascade_train.options import Order

LEAST_BLOCK = 1024  # samples: a block of fewer would hold too few of a small source to keep its share
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Mixture(JoinedSource):
    """Sources by name. Crop, buckets and workers are the mixture's; captions and filters are each source's own.

    A sample that comes more than once in an epoch is another sample each time, with draws of its own. Where a number
    is not whole, the samples that come once more are the same in every epoch. With `shares`, every sample comes at
    least once, and sources are repeated until their shares are met.
    """

    sources: dict[str, Source]
    repeats: Order[dict[str, float] | None]
    shares: Order[dict[str, float] | Literal["equal"] | None]
    loss_weights: dict[str, float] | None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources={} names nothing to mix: +data@data.sources.mine=folder adds a source")
        if isinstance(self.shares, str) and self.shares != "equal":
            raise ValueError(
                f"data.shares={self.shares} is unknown: write equal, or {{{next(iter(self.sources))}: 0.5, ...}}"
            )
        if self.shares is not None and self.repeats is not None:
            raise ValueError("data.repeats and data.shares both say how often samples come: set one of them to null")
        for key in ("repeats", "shares", "loss_weights"):
            given = getattr(self, key)
            for name, number in given.items() if isinstance(given, Mapping) else ():
                if name not in self.sources:
                    raise ValueError(f"data.{key}.{name} names no source; there are {', '.join(self.sources)}")
                if number <= 0:
                    raise ValueError(f"data.{key}.{name}={number} must be above 0; leave the source out instead")
        if isinstance(self.shares, Mapping) and (missing := set(self.sources) - set(self.shares)):
            raise ValueError(f"data.shares has none for {', '.join(sorted(missing))}: give every source a share")
        super().__post_init__()

    def joined(self) -> dict[str, Source]:
        """See `JoinedSource.joined`."""
        return {f"sources.{name}": source for name, source in self.sources.items()}

    def open(self) -> Index:
        """Open every source and lay their samples out, as often as they come. Raises as theirs."""
        opened = {name: Part.opened(source) for name, source in self.sources.items()}
        factors = self._factors({name: len(part.rows) for name, part in opened.items()})
        parts = []
        for name, part in opened.items():
            weight = (self.loss_weights or {}).get(name, 1.0)
            parts.append(replace(part, rows=_repeated(name, part, factors[name]), prefix=f"{name}/", weight=weight))
        total = sum(len(part.rows) for part in parts)
        for name, part in zip(opened, parts, strict=True):
            _log.info(
                "%s: %d samples an epoch (%.1f %%), each %.3g times.",
                name, len(part.rows), 100 * len(part.rows) / total, factors[name],
            )  # fmt: skip
        shards = max(len(part.index.shards) for part in parts)
        blocks = max(1, min(shards, total // LEAST_BLOCK))  # as the source of most shards has, none of them small
        return self._join(parts, "mixture", blocks)

    def _factors(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return how often each source's samples come."""
        if self.shares is None:
            return {name: (self.repeats or {}).get(name, 1.0) for name in sizes}
        shares = dict.fromkeys(sizes, 1.0) if isinstance(self.shares, str) else self.shares
        epoch = max(size / shares[name] for name, size in sizes.items())  # its length, in shares
        return {name: epoch * shares[name] / size for name, size in sizes.items()}


def _repeated(name: str, part: Part, factor: float) -> np.ndarray:
    counts = np.zeros(len(part.index), dtype=np.int64)
    counts[part.rows] = repeat_counts(part.index.keys[part.rows].tolist(), factor)
    if not counts.any():
        raise ConfigError(f"data.repeats.{name}={factor} of {len(part.rows)} samples is less than one; raise it")
    return repeated_rows(counts)
