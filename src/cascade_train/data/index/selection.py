"""Which rows of an index take part at all, decided before anything is planned, so that all ranks agree.

By the index alone: by the size of pictures, or by a list of unreadable ones (engine/faults/bad_samples.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cascade_train.data.index.row_filter import PASSED, RowFilter, parse_row_filters
from cascade_train.data.index.rows import Index, first_names
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import bounded_lines, open_regular, read_json
from cascade_train.redaction import printable

SIZE_FILTERS, QUARANTINE = "data.size_filters", "data.quarantine"
QUARANTINE_FOLDER = "quarantine"
"""Folder of a run that holds its list of unreadable samples, one file per rank."""

MEASURES: Mapping[str, Callable[[int, int], float]] = {
    "width": lambda width, height: width,
    "height": lambda width, height: height,
    "short_side": min,
    "long_side": max,
    "aspect_ratio": lambda width, height: width / height,
    "megapixels": lambda width, height: width * height / 1e6,
}
"""Names in size filters, computed from width and height in pixels of the upright picture."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, kw_only=True)
class Selection:
    """One selector's verdict."""

    kept: np.ndarray  # (N,) bool, which rows of the index may take part
    reason: str  # why the others may not, the end of a sentence: "are enlarged by more than data.buckets.max_upscale=2"


RowSelector = Callable[[Index], Selection]


def selected(index: Index, selectors: Iterable[RowSelector]) -> np.ndarray:
    """(N,) bool, which rows every selector keeps, at least one; logs how many each leaves out."""
    kept, reports = np.broadcast_to(np.True_, len(index)), list[str]()
    for selection in (selector(index) for selector in selectors):
        if dropped := int((~selection.kept).sum()):
            reports.append(f"{dropped} of {len(index)} samples {selection.reason}")
            _log.info("Left out: %s.", reports[-1])
        kept = kept & selection.kept
    if not len(index):
        raise ConfigError("data: the source has no sample. Look at what its url or path names")
    if not kept.any():
        raise ConfigError(f"data: no sample is left to read: {'; '.join(reports)}. Relax what leaves them out.")
    return kept


def parse_size_filters(value: object) -> tuple[RowFilter, ...]:
    """Parse the value of `data.size_filters`, in the forms of `data.row_filters`, on `MEASURES`."""
    filters = parse_row_filters(value, key=SIZE_FILTERS).filters
    for unknown in (key for size_filter in filters for key in size_filter.keys if key not in MEASURES):
        known = ", ".join(MEASURES)
        raise ValueError(f"{SIZE_FILTERS}: {unknown} is no measure of a picture ({known}); see data.row_filters")
    return filters


def size_selection(filters: tuple[RowFilter, ...], index: Index) -> Selection:
    """Which samples meet every filter (at least one); logs how many meet each; an unknown size meets none."""
    sizes_N2 = np.stack([index.table["width"], index.table["height"]], axis=1).astype(np.int64)
    sizes_K2, size_N = np.unique(sizes_N2, axis=0, return_inverse=True)
    measured = [
        {name: measure(width, height) for name, measure in MEASURES.items()} if min(width, height) > 0 else {}
        for width, height in sizes_K2.tolist()
    ]
    kept = np.ones(len(index), dtype=bool)
    for size_filter in filters:
        passed = np.array([size_filter.verdict(measures) == PASSED for measures in measured])[size_N.ravel()]
        text = "%s %s: %d of %d samples pass (%.1f%%)"
        _log.info(text, SIZE_FILTERS, size_filter.name, passed.sum(), len(index), 100 * passed.mean())
        kept &= passed
    unknown = int((sizes_N2.min(axis=1) <= 0).sum())
    reason = f"do not meet {SIZE_FILTERS}" + (f" ({unknown} of them have no known size)" if unknown else "")
    return Selection(kept=kept, reason=reason)


def read_quarantine(path: Path) -> set[str]:
    """Names of samples in a file of lines `{"sample": "train.tar:0001", ...}`, or in those of a run."""
    folder = path / QUARANTINE_FOLDER
    files = [path] if path.is_file() else sorted(folder.glob("*.jsonl")) or sorted(path.glob("*.jsonl"))
    if not files or (path / "metrics.jsonl") in files:
        raise ConfigError(f"{QUARANTINE}={path} is no list of unreadable samples, nor a run with {folder}/*.jsonl")
    return {name for file in files for name in _read_names(file)}


def _read_names(file: Path) -> Iterator[str]:
    with open_regular(file) as opened:
        for number, line in enumerate(bounded_lines(opened, f"{QUARANTINE}: {file}"), start=1):
            try:
                yield str(read_json(line.decode(errors="replace"))["sample"])
            except (ValueError, LookupError, TypeError) as error:
                if not line.endswith(b"\n"):  # a run was killed while it wrote
                    break
                text = f'{QUARANTINE}: line {number} of {file} names no sample, as {{"sample": "train.tar:0001"}} does'
                raise ConfigError(text) from error


def quarantine_selection(names: Collection[str], index: Index) -> Selection:
    """Leave out samples by name, see `Index.name`; logs names that are not in the data."""
    colons = ((name, start) for name in names for start, mark in enumerate(name) if mark == ":")
    keys = {name[start + 1 :] for name, start in colons}
    texts = (printable(key.decode(errors="surrogateescape")) for key in index.keys.tolist())
    candidates = [row for row, text in enumerate(texts) if text in keys]
    listed = {row: index.name(row) for row in candidates if index.name(row) in names}
    kept = np.ones(len(index), dtype=bool)
    kept[list(listed)] = False
    counts = Counter(name for name, _ in {(name, int(index.content[row])) for row, name in listed.items()})
    if shared := [f"{name} ({count})" for name, count in sorted(counts.items()) if count > 1]:
        text = "%s: %d names are those of several samples, all of which are left out: %s"
        _log.warning(text, QUARANTINE, len(shared), first_names(shared))
    if missing := len(names) - len(set(listed.values())):
        _log.info("%s: %d of %d names are not in this data.", QUARANTINE, missing, len(names))
    return Selection(kept=kept, reason=f"are listed in {QUARANTINE}")
