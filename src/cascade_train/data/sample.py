"""One sample on its way from a source to a batch, and how many unreadable ones stop a run.

No reading and no decoding here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cascade_train.errors import RunError
from cascade_train.files.untrusted import read_json
from cascade_train.redaction import LONGEST_NAME, LONGEST_REASON, shortened

if TYPE_CHECKING:
    from cascade_train.batch import Unreadable

FEW = 3
"""Unreadable samples that no share counts against, while they are at most half of all: few samples say little."""


class UnreadableSampleError(RunError):
    """The content of one sample is damaged; a neighbour stands in for it, and it is counted."""


@dataclass(frozen=True, kw_only=True)
class RawSample:
    """What a source returns for one row of its index.

    Attributes:
        image: an encoded picture (jpg, png, webp), or (H, W, 3) uint8 RGB; None where `tensors` hold what is made
            of it.
        caption: the text, without dropout.
        key: where the sample came from, for messages.
        weight: of its loss.
        mask: where the loss counts: an encoded picture of the image's size, or (H, W) uint8; None = everywhere.
        values: what else is known of the sample (its json, its columns), for captions and their templates.
        tensors: arrays that go into the batch as they are, by name (what a cache holds).
    """

    image: bytes | np.ndarray | None
    caption: str
    key: str
    weight: float = 1.0
    mask: bytes | np.ndarray | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """Return what is known of a sample under a key; None = nothing.

    Args:
        values: as `RawSample` has them.
        key: of `values`; where there is none, dots lead into them, `meta.title`, and a text on the way is read as json.
    """
    if key in values:
        return values[key]
    value: Any = values
    for name in key.split("."):
        value = _parsed(value) if isinstance(value, str) else value
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _parsed(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return None


def most_unreadable(samples: int, max_share: float) -> float:
    """Return how many unreadable samples do not stop a run: a share of them, or a few where that is more."""
    return max(min(FEW, samples // 2), max_share * samples)


def too_many_text(count: int, samples: int, max_share: float, listed: str) -> str:
    """Return that too many samples are unreadable, and the remedies: among them a share that would do."""
    return (
        f"{count} of {samples} samples are unreadable, more than data.max_unreadable_share={max_share:g} allows:"
        f" {listed}. Remove or replace them, or allow as many by"
        f" data.max_unreadable_share={min(1.0, math.ceil(100 * count / samples) / 100):g}."
    )


def by_reason(unreadable: Iterable[Unreadable]) -> str:
    """Return the samples for a message, those of one reason together."""
    names: dict[str, list[str]] = {}
    for each in dict.fromkeys(unreadable):
        names.setdefault(each.reason, []).append(shortened(each.name, LONGEST_NAME))
    return "; ".join(f"{', '.join(same)} ({shortened(reason, LONGEST_REASON)})" for reason, same in names.items())
