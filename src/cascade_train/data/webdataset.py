"""Captioned pictures in tar files of the webdataset layout, read by offset.

Order, sharding and shuffling are not read from the tars here: the plan decides them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.data.index import Index
from cascade_train.data.row_filter import parse_row_filters, passing, read_metadata
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.data.source import Source
from cascade_train.data.tar_index import ShardIndex, load_shard
from cascade_train.data.tar_verdicts import load_verdicts
from cascade_train.data.urls import expand_urls
from cascade_train.errors import ConfigError, RunError

MAX_UNREADABLE_SHARE = 0.01
_MAX_OPEN_FILES = 64
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class WebDataset(Source):
    """Samples KEY.jpg (or jpeg, png, webp) with KEY.txt in tar files.

    Attributes:
        urls: a local path, a `file:` path, a brace pattern such as `shards/{000..005}.tar`, or a list of them.
        index_dir: folder for the cached index; None = beside the tars, else the user's cache folder.
        row_filters: conditions on each sample's json: a list of [key, condition], or a mapping; None = all samples.
    """

    urls: list[str] | str
    index_dir: str | None
    row_filters: list[list[Any]] | dict[str, str] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        entries = [self.urls] if isinstance(self.urls, str) else list(self.urls)
        if not entries or not all(isinstance(entry, str) and entry for entry in entries):
            raise ValueError(f"data.urls={self.urls} must be a path or a list of paths, as in data.urls=[a.tar,b.tar]")
        self._filters = parse_row_filters(self.row_filters)
        self._paths: list[Path] = []
        self._files = _OpenFiles()

    def open(self) -> Index:
        """Index every tar, or take its index from the cache.

        Raises:
            ConfigError: a tar is missing, empty, compressed, unsorted, or without a usable sample; or no sample meets
                `row_filters`.
            RunError: a tar cannot be read, or more than 1 % of the pictures have no readable header.
        """
        self._paths = expand_urls(self.urls)
        cache_dir = None if self.index_dir is None else Path(self.index_dir)
        try:
            shards = [load_shard(path, cache_dir) for path in self._paths]
            kept = self._judge(shards, cache_dir)
        except OSError as error:
            raise RunError(f"data.urls: a tar cannot be read: {error}") from error
        for path, shard in zip(self._paths, shards, strict=True):
            if shard.dropped.examples:
                _log.warning("%s: left out %s", path, shard.dropped.text())
        table = np.concatenate([shard.table for shard in shards])
        table["shard"] = np.repeat(np.arange(len(shards)), [len(shard.table) for shard in shards])
        names = tuple(path.name for path in self._paths)
        keys = np.concatenate([shard.keys for shard in shards])
        index = Index(shards=names, table=table[kept], keys=keys[kept], filters=self._filters.identity)
        _refuse_unreadable(index)
        self._index = index
        return index

    def _judge(self, shards: list[ShardIndex], cache_dir: Path | None) -> np.ndarray | slice:
        """Return which samples of all shards meet the row filters, and log how many do."""
        if not len(self._filters):
            return slice(None)
        parts = zip(self._paths, shards, strict=True)
        verdicts = np.concatenate([load_verdicts(path, shard, self._filters, cache_dir) for path, shard in parts])
        report = self._filters.report(verdicts)
        for line in report:
            _log.info("%s", line)
        kept = passing(verdicts)
        if not kept.any():
            raise ConfigError("no sample is left, so nothing can train; relax the filters. " + "; ".join(report))
        return kept

    def read(self, row: int) -> RawSample:
        """Read picture and caption of one row."""
        entry = self._index.table[row]
        path, key = self._paths[entry["shard"]], self._index.name(row)
        image = self._files.read(path, int(entry["image_start"]), int(entry["image_bytes"]))
        caption = self._files.read(path, int(entry["caption_start"]), int(entry["caption_bytes"]))
        values = self._values(path, entry) if self.captions.needs_values else {}
        try:
            return RawSample(image=image, caption=caption.decode().strip(), key=key, values=values)
        except UnicodeDecodeError as error:
            raise UnreadableSampleError(f"the caption is not UTF-8: {error}") from error

    def _values(self, path: Path, entry: np.void) -> Mapping[str, Any]:
        """Read what the sample's json says; nothing where it has none, or one that cannot be read."""
        size = int(entry["json_bytes"])
        return read_metadata(self._files.read(path, int(entry["json_start"]), size) if size else None) or {}


def _refuse_unreadable(index: Index) -> None:
    rows = np.flatnonzero(index.table["width"] == 0)
    if len(rows) > max(1, MAX_UNREADABLE_SHARE * len(index)):
        names = ", ".join(index.name(row) for row in rows[:10])
        raise RunError(
            f"data.urls: {len(rows)} of {len(index)} pictures are unreadable, more than {MAX_UNREADABLE_SHARE:.0%}:"
            f" {names}{', ...' if len(rows) > 10 else ''}; remove or replace them"
        )


class _OpenFiles:
    """Descriptors of the tars read last. A process that gets a copy, by fork or pickle, may read on."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __getstate__(self) -> dict[str, object]:
        return {"_descriptors": {}}

    def read(self, path: Path, start: int, size: int) -> bytes:
        content = os.pread(self._descriptor(path), size, start)
        if len(content) != size:
            raise OSError(f"{path} ended at {start + len(content)} of {start + size} bytes: it changed during the run")
        return content

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            if len(self._descriptors) >= _MAX_OPEN_FILES:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]
