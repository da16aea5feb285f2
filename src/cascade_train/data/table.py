"""Pictures that a table (csv, tsv, jsonl) names, with their captions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.data.files.pictures import load_picture_sizes, refuse_unreadable
from cascade_train.data.files.tables import TableFile, table_file
from cascade_train.data.index.row_filter import parse_row_filters
from cascade_train.data.index.row_verdicts import judged, passing_rows
from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError, RunError
from cascade_train.options import File, Free, Order

TABLE_FIELDS = [*ROW_FIELDS, ("bytes", "<i8"), ("row_start", "<i8"), ("row_bytes", "<i8")]
_SHOWN = 5
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Table(Source):
    """Rows of tables, each with the path of a picture and its caption. A picture may come in several rows.

    Attributes:
        path: of a table, or a list of them: .csv or .tsv with the columns' names in the first row, .jsonl with a
            mapping in each line.
        image_column: with the picture's path.
        caption_column: with the caption, in jsonl also a list of them; null = captions are made by `captions` alone.
        mask_column: with the path of a mask, white where the loss counts; null = none.
        root: folder that the paths are relative to; null = the table's own.
        index_dir: folder for the cached index; None = beside the table, else the user's cache folder.
        row_filters: conditions on the columns: a list of [key, condition], or a mapping; None = all rows.
    """

    path: Order[File[list[str] | str]]
    image_column: str
    caption_column: str | None
    mask_column: str | None
    root: Order[File[str | None]]
    index_dir: Free[str | None]
    row_filters: Order[list[list[Any]] | dict[str, str] | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._filters = parse_row_filters(self.row_filters)
        self._paths = [Path(path).expanduser() for path in ([self.path] if isinstance(self.path, str) else self.path)]
        if not self._paths:
            raise ValueError("data.path=[] names no table: give a path or a list of paths")
        self._cache_dir = None if self.index_dir is None else Path(self.index_dir)

    def check(self) -> None:
        """See `Source.check`: the tables, and their columns."""
        wanted = {column for column in (self.image_column, self.caption_column, self.mask_column) if column is not None}
        for file in map(table_file, self._paths):
            columns: dict[str, None] = {}
            for row in file.rows():
                columns.update(dict.fromkeys(row.values))
                if wanted <= columns.keys():
                    break
            self._check_columns(file, columns)

    def open(self) -> Index:
        """Read the tables, and the headers of the pictures that changed.

        Raises:
            ConfigError: a table is missing, lacks a column, or has no usable row; no row meets `row_filters`.
            RunError: a file cannot be read, or too many pictures have no readable header.
        """
        self._files = [table_file(path) for path in self._paths]
        try:
            parts = [self._indexed(file, shard) for shard, file in enumerate(self._files)]
        except OSError as error:
            raise RunError(f"data.path={self.path} cannot be read: {error}") from error
        table, keys = (np.concatenate([part[field] for part in parts]) for field in (0, 1))
        if len(self._filters):
            kept = passing_rows(self._filters, np.concatenate([part[2] for part in parts]))
            table, keys = table[kept], keys[kept]
        names = tuple(file.path.name for file in self._files)
        index = Index(shards=names, table=table, keys=keys, filters=self._filters.identity)
        refuse_unreadable(index, f"data.path={self.path}", self.max_unreadable_share)
        self._index = index
        return index

    def _indexed(self, file: TableFile, shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return table, keys and verdicts of one file's usable rows."""
        places, names, verdicts = [], [], []
        columns: dict[str, None] = {}
        unfilled = 0
        for row in file.rows():
            columns.update(dict.fromkeys(row.values))
            if not self._is_filled(row.values):
                unfilled += 1
                continue
            places.append((row.start, row.size))
            names.append(str(row.values[self.image_column]))
            if len(self._filters):
                verdicts.append(judged(self._filters, _with_numbers(row.values)))
        self._check_columns(file, columns)
        sizes = load_picture_sizes(file.path, self._root(file), names, self._cache_dir)
        there = sizes.size >= 0
        self._report(file, unfilled, [name for name, found in zip(names, there.tolist(), strict=True) if not found])
        if not there.any():
            raise ConfigError(self._nothing_usable_text(file, unfilled, names))
        table = np.zeros(len(names), dtype=TABLE_FIELDS)
        table["shard"], table["bytes"] = shard, sizes.size
        table["width"], table["height"] = sizes.values.T
        table["row_start"], table["row_bytes"] = np.array(places).T
        keys = np.array([name.encode(errors="replace") for name in names])
        judgements = np.array(verdicts) if verdicts else np.zeros((len(names), 1))
        return table[there], keys[there], judgements[there]

    def _check_columns(self, file: TableFile, columns: Mapping[str, Any]) -> None:
        """Check that some row has each of the columns that are asked for.

        Raises:
            ConfigError: none has.
        """
        for key in ("image_column", "caption_column", "mask_column"):
            column = getattr(self, key)
            if column is not None and column not in columns:
                has = ", ".join(columns) or "no rows"
                raise ConfigError(f"data.{key}={column} is no column of {file.path}, which has {has}")

    def _is_filled(self, values: Mapping[str, Any]) -> bool:
        """Return whether a row names a picture and has a caption where one is asked for."""
        wanted = [self.image_column, *([] if self.caption_column is None else [self.caption_column])]
        return all(values.get(column) not in (None, "", []) for column in wanted)

    def _root(self, file: TableFile) -> Path:
        return file.path.parent if self.root is None else Path(self.root).expanduser()

    def _report(self, file: TableFile, unfilled: int, missing: list[str]) -> None:
        if unfilled:
            _log.warning("%s: left out %d rows without a picture's path or a caption", file.path, unfilled)
        if missing:
            _log.warning("%s: left out %d pictures that are not there: %s", file.path, len(missing), _names(missing))

    def _nothing_usable_text(self, file: TableFile, unfilled: int, names: list[str]) -> str:
        if not names:
            return (
                f"data.path={file.path} holds no row with a picture's path and a caption; {unfilled} lack one of them"
            )
        return (
            f"data.path={file.path}: none of {len(names)} pictures is there: {_names(names)}; paths are relative to"
            f" {self._root(file)}, data.root= sets another folder"
        )

    def read(self, row: int) -> RawSample:
        """Read the row of the table again, and the files that it names."""
        entry = self._index.table[row]
        file = self._files[entry["shard"]]
        values = file.read(int(entry["row_start"]), int(entry["row_bytes"]))
        root = self._root(file)
        mask = None if self.mask_column is None else values.get(self.mask_column)
        return RawSample(
            image=self.limits.read(root / str(values[self.image_column]), "image"),
            caption="" if self.caption_column is None else caption_text(values[self.caption_column]),
            key=self._index.name(row),
            mask=self.limits.read(root / str(mask), "mask") if mask else None,
            values=values,
        )


def caption_text(value: Any) -> str:
    """Return a caption as text, several as its lines.

    Raises:
        UnreadableSampleError: it is neither text nor a list of texts.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UnreadableSampleError(f"its caption is no text: {value!r:.60}")
    return "\n".join(text.strip() for text in texts)


def _with_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with texts that are numbers as such, as filters compare them."""
    return {key: _number(value) if isinstance(value, str) else value for key, value in values.items()}


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_SHOWN]) + (", ..." if len(listed) > _SHOWN else "")
