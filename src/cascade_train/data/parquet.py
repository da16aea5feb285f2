"""Captioned pictures in parquet files, in their columns or named by them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.data.files.parquet import (
    Columns,
    FileIndex,
    RowGroups,
    check_columns,
    load_file,
    open_parquet,
    picture_of,
    read_rows,
)
from cascade_train.data.files.pictures import load_picture_sizes, refuse_unreadable
from cascade_train.data.index.row_filter import parse_row_filters
from cascade_train.data.index.row_verdicts import judged, passing_rows
from cascade_train.data.index.rows import Index
from cascade_train.data.sample import RawSample
from cascade_train.data.source import Source
from cascade_train.data.table import caption_text
from cascade_train.errors import ConfigError, RunError
from cascade_train.options import File, Free, Order

MUCH_MEMORY = 2 * 1024**3
"""Bytes of row groups in one worker that are worth a warning."""
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Parquet(Source):
    """Rows of parquet files. A row group is read whole, and what the window mixes stays in memory, in every worker.

    Attributes:
        path: of a file, a folder with files and folders of them, or a list of both.
        image_column: with encoded pictures, or paths, or both as {bytes, path}.
        caption_column: with the caption; null = captions are made by `captions` alone.
        width_column: with the width in pixels as the picture is seen, so that pictures need not be read to find it;
            null = their headers are read once.
        height_column: with the height.
        root: folder that paths are relative to; null = the file's own.
        index_dir: folder for the cached index; None = beside the file, else the user's cache folder.
        row_filters: conditions on the columns: a list of [key, condition], or a mapping; None = all rows.
    """

    path: Order[File[list[str] | str]]
    image_column: str
    caption_column: str | None
    width_column: str | None
    height_column: str | None
    root: Order[File[str | None]]
    index_dir: Free[str | None]
    row_filters: Order[list[list[Any]] | dict[str, str] | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.width_column is None) != (self.height_column is None):
            raise ValueError("data.width_column and data.height_column belong together: set both, or none")
        self._filters = parse_row_filters(self.row_filters)
        self._columns = Columns(
            image=self.image_column, caption=self.caption_column, width=self.width_column, height=self.height_column
        )
        self._groups = RowGroups(self.shuffle_window_shards + 1)
        self._paths: list[Path] = []

    def check(self) -> None:
        """See `Source.check`: the files, and the columns of the first."""
        first = _files([self.path] if isinstance(self.path, str) else self.path)[0]
        with open_parquet(first) as file:
            check_columns(first, file.schema_arrow.names, self._columns)

    def open(self) -> Index:
        """Index every file, or take its index from the cache.

        Raises:
            ConfigError: a file is missing, lacks a column, or has no usable row; no row meets `row_filters`.
            RunError: a file cannot be read, or too many pictures have no readable header.
        """
        cache_dir = None if self.index_dir is None else Path(self.index_dir)
        try:
            self._paths = _files([self.path] if isinstance(self.path, str) else self.path)
            self._report_memory()
            parts = [self._usable(path, load_file(path, self._columns, cache_dir), cache_dir) for path in self._paths]
            kept = self._judge(parts)
        except OSError as error:
            raise RunError(f"data.path={self.path} cannot be read: {error}") from error
        index = self._joined(parts, kept)
        refuse_unreadable(index, f"data.path={self.path}", self.max_unreadable_share)
        self._index = index
        return index

    def _report_memory(self) -> None:
        """Say what a worker keeps in memory, loudly where it is much."""
        sizes = []
        for path in self._paths:
            with open_parquet(path) as file:
                sizes += [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
        kept = sum(sorted(sizes)[-self.shuffle_window_shards - 1 :])
        _log.log(
            logging.WARNING if kept > MUCH_MEMORY else logging.INFO,
            "%d row groups of up to %.0f MiB: each worker keeps up to %.1f GiB of them (data.shuffle_window_shards=%d"
            " and one); files written with fewer rows in a group need less.",
            len(sizes), max(sizes, default=0) / 2**20, kept / 2**30, self.shuffle_window_shards,
        )  # fmt: skip

    def _usable(self, path: Path, file: FileIndex, cache_dir: Path | None) -> FileIndex:
        """Complete the index of a file by the pictures that lie in files, and leave out what is not there."""
        table, apart = file.table.copy(), file.table["bytes"] < 0
        names = [key.decode() for key in file.keys[apart].tolist()]
        if names:
            facts = load_picture_sizes(path, self._root(path), names, cache_dir)
            table["bytes"][apart] = facts.size
            if self.width_column is None:
                table["width"][apart], table["height"][apart] = facts.values.T
        there = table["bytes"] >= 0
        if file.unfilled:
            _log.warning("%s: left out %d rows without a picture or a caption", path, file.unfilled)
        if not there.all():
            absent = ", ".join(key.decode() for key in file.keys[~there][:5].tolist())
            _log.warning("%s: left out %d rows whose pictures are not there: %s", path, (~there).sum(), absent)
        return FileIndex(table=table[there], keys=file.keys[there], unfilled=file.unfilled)

    def _judge(self, parts: list[FileIndex]) -> np.ndarray | slice:
        """Return which of all files' usable rows meet the row filters."""
        if not len(self._filters):
            return slice(None)
        verdicts = [self._verdicts(path, part) for path, part in zip(self._paths, parts, strict=True)]
        return passing_rows(self._filters, np.concatenate(verdicts))

    def _verdicts(self, path: Path, part: FileIndex) -> np.ndarray:
        wanted = {key for each in self._filters.filters for key in each.keys}
        verdicts = []
        with open_parquet(path) as file:
            names = [name for name in file.schema_arrow.names if name in wanted]
            for group in range(file.num_row_groups):
                rows = list(read_rows(file, group, names)) if names else []
                here = part.table["row"][part.table["shard"] == group].tolist()
                verdicts += [judged(self._filters, _present(rows[row]) if rows else {}) for row in here]
        return np.array(verdicts).reshape(-1, 1 + len(self._filters))

    def _joined(self, parts: list[FileIndex], kept: np.ndarray | slice) -> Index:
        """Return one index of all files, its shards their row groups."""
        self._places: list[tuple[Path, int]] = []
        for path, part in zip(self._paths, parts, strict=True):
            first = len(self._places)
            self._places += [(path, group) for group in range(int(part.table["shard"].max(initial=-1)) + 1)]
            part.table["shard"] += first
        table, keys = (np.concatenate([getattr(part, name) for part in parts]) for name in ("table", "keys"))
        if not len(table):
            raise ConfigError(f"data.path={self.path} holds no row with a picture that is there and a caption")
        names = tuple(f"{path.name}#{group}" for path, group in self._places)
        return Index(shards=names, table=table[kept], keys=keys[kept], filters=self._filters.identity)

    def _root(self, path: Path) -> Path:
        return path.parent if self.root is None else Path(self.root).expanduser()

    def read(self, row: int) -> RawSample:
        """Read one row, its row group from memory where it is there."""
        entry = self._index.table[row]
        path, group = self._places[entry["shard"]]
        names = None if self.captions.needs_values else self._columns.names()
        values = self._groups.row(path, group, int(entry["row"]), names)
        image, name = picture_of(values[self.image_column])
        if image is None:
            image = self.limits.read(self._root(path) / name, "image")
        self.limits.check("image", len(image))
        return RawSample(
            image=image,
            caption="" if self.caption_column is None else caption_text(values[self.caption_column]),
            key=self._index.name(row),
            values={key: value for key, value in _present(values).items() if key != self.image_column},
        )


def _files(given: list[str]) -> list[Path]:
    """Return the files that paths of files and folders name, a folder's in the order of their names.

    Raises:
        ConfigError: there are none.
    """
    paths = []
    for path in (Path(each).expanduser() for each in given):
        found = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise ConfigError(
                f"data.path={path} is no parquet file, nor a folder that holds some; paths are relative to the current"
                f" folder, {Path.cwd()}"
            )
        paths += found
    if not paths:
        raise ConfigError("data.path=[] names no parquet file: give a path or a list of paths")
    return paths


def _present(values: dict[str, Any]) -> dict[str, Any]:
    """Return what a row has, without its nulls."""
    return {key: value for key, value in values.items() if value is not None}
