"""Verdicts of row filters on the samples of one tar, and their cache beside the tar's index.

What a filter is lives in index/row_filter.py; where the json of each sample lies is known from the index.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cascade_train.data.index.cache import read_cache, write_cache
from cascade_train.data.index.row_filter import RowFilters
from cascade_train.data.tar.files import Tar
from cascade_train.data.tar.index import ShardIndex, cache_file


def load_verdicts(
    tar: Tar, shard: ShardIndex, filters: RowFilters, cache_dir: Path | None, *, largest: int | None = None
) -> np.ndarray:
    """Return the verdict of each filter on each sample, from the cache if it is there, else from the tar.

    Args:
        tar: one that has places.
        shard: its index.
        filters: at least one.
        cache_dir: see `load_shard`.
        largest: bytes of a json that is read; a larger one counts as none. None = any.

    Returns:
        (N, 1 + filters) uint8, see `RowFilters.verdicts`.

    Raises:
        ConfigError: the verdicts cannot be kept where the user wants them.
        OSError: the tar cannot be read.
        RunError: its store fails.
    """
    index = cache_file(tar, cache_dir)
    is_limited = largest is not None and bool((shard.table["json_bytes"] > largest).any())
    limit = f"-{largest}" if is_limited else ""
    cached = index.with_name(f"{index.stem}-filters-{filters.identity}{limit}.npz")
    verdicts = _read_cache(cached, (len(shard.table), 1 + len(filters)))
    if verdicts is None:
        verdicts = judge_shard(tar, shard, filters, largest)
        write_cache(cached, {"verdicts": verdicts}, required=cache_dir is not None)
    return verdicts


def judge_shard(tar: Tar, shard: ShardIndex, filters: RowFilters, largest: int | None) -> np.ndarray:
    """Read every sample's json once and judge it, see `load_verdicts`.

    Raises:
        OSError: the tar cannot be read.
        RunError: its store fails.
    """
    verdicts = np.zeros((len(shard.table), 1 + len(filters)), dtype=np.uint8)
    with tar.open() as file:
        for row, entry in enumerate(shard.table):
            file.seek(int(entry["json_start"]))
            size = int(entry["json_bytes"])
            is_read = size > 0 and (largest is None or size <= largest)
            content = file.read(size) if is_read else None
            verdicts[row] = filters.verdicts(content)
    return verdicts


def _read_cache(cached: Path, shape: tuple[int, int]) -> np.ndarray | None:
    verdicts = (read_cache(cached) or {}).get("verdicts")
    return verdicts if verdicts is not None and verdicts.shape == shape else None
