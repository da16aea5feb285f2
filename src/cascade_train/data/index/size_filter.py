"""Which samples take part by the size of their picture, as the index has it from the headers: nothing is decoded.

Conditions are those of index/row_filter.py, on names that every source knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np

from cascade_train.data.index.row_filter import PASSED, RowFilter, parse_row_filters
from cascade_train.data.index.rows import Index
from cascade_train.data.index.selection import Selection

KEY = "data.size_filters"
MEASURES: Mapping[str, Callable[[int, int], float]] = {
    "width": lambda width, height: width,
    "height": lambda width, height: height,
    "short_side": min,
    "long_side": max,
    "aspect_ratio": lambda width, height: width / height,
    "megapixels": lambda width, height: width * height / 1e6,
}
"""What conditions may ask for, by width and height in pixels of the upright picture."""

_log = logging.getLogger(__name__)


def parse_size_filters(given: object) -> tuple[RowFilter, ...]:
    """Parse the value of `data.size_filters`, in the forms of `data.row_filters`.

    Raises:
        ValueError: another form, a condition that is refused, or a key that is no measure of a picture.
    """
    filters = parse_row_filters(given, key=KEY).filters
    for unknown in (key for each in filters for key in each.keys if key not in MEASURES):
        raise ValueError(
            f"{KEY}: {unknown} is no measure of a picture: choose {', '.join(MEASURES)}; conditions on a sample's json"
            " or columns belong in data.row_filters"
        )
    return filters


def size_selection(filters: tuple[RowFilter, ...], index: Index) -> Selection:
    """Return which samples meet every filter, and log how many meet each; one without a known size meets none.

    Args:
        filters: at least one.
        index: the samples, with their sizes.
    """
    sizes_K2, place_N = np.unique(_sizes(index), axis=0, return_inverse=True)
    verdicts = np.array([[_passes(each, width, height) for width, height in sizes_K2.tolist()] for each in filters])
    known_N = (sizes_K2.min(axis=1) > 0)[place_N.ravel()]
    for each, passes_K in zip(filters, verdicts, strict=True):
        passed = int(passes_K[place_N.ravel()].sum())
        _log.info(
            "%s %s: %d of %d samples pass (%.1f%%)", KEY, each.name, passed, len(index), 100 * passed / len(index)
        )
    unknown = int((~known_N).sum())
    reason = f"do not meet {KEY}" + (f" ({unknown} of them have no known size)" if unknown else "")
    return Selection(kept=np.logical_and.reduce(verdicts)[place_N.ravel()], reason=reason)


def _sizes(index: Index) -> np.ndarray:
    return np.stack([index.table["width"], index.table["height"]], axis=1).astype(np.int64)


def _passes(condition: RowFilter, width: int, height: int) -> bool:
    if min(width, height) <= 0:
        return False
    return condition.verdict({name: measure(width, height) for name, measure in MEASURES.items()}) == PASSED
