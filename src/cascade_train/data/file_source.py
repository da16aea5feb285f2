"""The bases of the sources whose pictures lie in files: found in a folder, or in or named by the rows of tables."""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cascade_train.data.index.cache import load_picture_facts
from cascade_train.data.index.row_filter import parse_row_filters
from cascade_train.data.index.rows import Index, combine, first_names
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError, RunError
from cascade_train.options import File, Free, Order

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class FileSource(Source):
    """Pictures in files; what is read of files that did not change comes from a cache."""

    path: Order[File[list[str] | str]]
    index_dir: Free[str | None]
    row_filters: Order[list[list[Any]] | dict[str, str] | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._filters = parse_row_filters(self.row_filters)
        self._cache_dir = None if self.index_dir is None else Path(self.index_dir)

    def open(self) -> Index:
        """See `Source.open`: index all files."""
        try:
            self._index = self._build_index()
        except OSError as error:
            raise RunError(f"data.path={self.path} cannot be read: {error}") from error
        return self._index

    @abc.abstractmethod
    def _build_index(self) -> Index:
        """Return the index of the usable samples that meet the row filters."""


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """The rows of one table that have a picture and a caption."""

    table: np.ndarray  # (N,) structured; `shard` counts within the table, `bytes` is -1 where the picture is a file
    keys: np.ndarray  # (N,) bytes
    names: list[str]  # paths of the pictures that are files
    unfilled: int  # how many rows have no picture or no caption
    verdicts: np.ndarray  # (N, 1 + filters), see `RowFilters.judge`
    content: np.ndarray  # (N,) uint64, see `Index.content`, of all but pictures that are files


@dataclass(kw_only=True)
class TableSource(FileSource):
    """Rows of tables, each with a picture or its path and a caption."""

    shard_name: ClassVar[str] = "{0}"  # of a file's name and the number of one of its shards
    image_column: str
    caption_column: str | None
    root: Order[File[str | None]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._paths = [Path(path).expanduser() for path in ([self.path] if isinstance(self.path, str) else self.path)]
        if not self._paths:
            raise ConfigError("data.path=[] names no file: give a path or a list of paths")
        self._gives_sizes = False  # whether the tables themselves have those of the pictures

    @abc.abstractmethod
    def _tables(self) -> list[Path]:
        """Return the files of all tables."""

    @abc.abstractmethod
    def _scan(self, path: Path) -> TableRows:
        """Read the rows of one table."""

    def _build_index(self) -> Index:
        self._shards: list[tuple[Path, int]] = []
        parts = []
        for path in self._tables():
            part = self._usable(path, self._scan(path))
            first = len(self._shards)
            self._shards += [(path, number) for number in range(int(part.table["shard"].max(initial=-1)) + 1)]
            part.table["shard"] += first
            parts.append(part)
        table, keys, verdicts, content = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("table", "keys", "verdicts", "content")
        )
        if not len(table):
            raise ConfigError(f"data.path={self.path} holds no row with a picture that is there and a caption")
        if len(self._filters):
            kept = self._filters.kept(verdicts)
            table, keys, content = table[kept], keys[kept], content[kept]
        names = tuple(self.shard_name.format(path.name, number) for path, number in self._shards)
        return Index(shards=names, table=table, keys=keys, filters=self._filters.identity, content=content)

    def _usable(self, path: Path, rows: TableRows) -> TableRows:
        """Add the facts of the pictures that are files, and leave out rows whose pictures are not there."""
        table, is_file, content = rows.table.copy(), rows.table["bytes"] < 0, rows.content.copy()
        file_bytes, facts = load_picture_facts(path, self._root(path), rows.names, self._cache_dir)
        content[is_file] = combine(content[is_file], facts[:, 2])
        table["bytes"][is_file] = file_bytes
        if not self._gives_sizes:
            table["width"][is_file], table["height"][is_file] = facts[:, :2].T
        there = table["bytes"] >= 0
        if rows.unfilled:
            _log.warning("%s: left out %d rows without a picture or a caption", path, rows.unfilled)
        if missing := [name for name, size in zip(rows.names, file_bytes.tolist(), strict=True) if size < 0]:
            text = "%s: left out %d rows whose pictures are not there: %s"
            _log.warning(text, path, len(missing), first_names(missing))
        kept = {name: getattr(rows, name)[there] for name in ("keys", "verdicts")}
        return replace(rows, table=table[there], content=content[there], **kept)

    def _check_columns(self, path: Path, found: Iterable[str]) -> None:
        """Raise a ConfigError where a table lacks a column that an option names."""
        has = list(found)
        for key in ("image_column", "caption_column", "mask_column", "width_column", "height_column"):
            column = getattr(self, key, None)
            if column is not None and column not in has:
                raise ConfigError(
                    f"data.{key}={column} is no column of {path}, which has {', '.join(has) or 'no rows'}"
                )

    def _root(self, path: Path) -> Path:
        return path.parent if self.root is None else Path(self.root).expanduser()

    def _caption(self, values: Mapping[str, Any]) -> str:
        """Return the caption of a row, several as its lines."""
        if self.caption_column is None:
            return ""
        value = values[self.caption_column]
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UnreadableSampleError(f"its caption is no text: {value!r:.60}")
        return "\n".join(text.strip() for text in texts)
