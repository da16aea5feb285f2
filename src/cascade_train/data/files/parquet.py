"""Parquet files: their rows' pictures and sizes, read once and kept, and single rows later, by whole row groups.

Needs pyarrow, which is imported where a file is opened.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.data.decoding.decode import upright_size
from cascade_train.data.index.cache import default_cache_dir, read_cache, write_cache
from cascade_train.data.index.rows import ROW_FIELDS
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.errors import ConfigError, install_hint

PARQUET_FIELDS = [*ROW_FIELDS, ("row", "<i4"), ("bytes", "<i8")]
"""Of a row: `shard` is its row group, `row` its place in it, `bytes` those of its picture."""
_FORMAT = 1
_BATCH = 64  # rows that are taken apart at once


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns are read.

    Attributes:
        image: with encoded pictures, with paths, or with both as {bytes, path}.
        caption: with the caption; None = none.
        width: with the picture's width in pixels, as it is seen; None = the picture's header is read.
        height: with its height.
    """

    image: str
    caption: str | None
    width: str | None
    height: str | None

    def names(self) -> list[str]:
        """Return those that are asked for."""
        return [name for name in (self.image, self.caption, self.width, self.height) if name is not None]


@dataclass(frozen=True, kw_only=True)
class FileIndex:
    """The rows of one file that have what is asked for.

    Attributes:
        table: (N,) structured array with the fields of `PARQUET_FIELDS`; -1 bytes where the picture is a file.
        keys: (N,) bytes, the picture's path where it has one.
        unfilled: how many rows have no picture or no caption.
    """

    table: np.ndarray
    keys: np.ndarray
    unfilled: int


def open_parquet(path: Path) -> Any:
    """Open a file with pyarrow.

    Raises:
        ConfigError: pyarrow is not installed, or the file is no parquet file.
        OSError: the file cannot be read.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"data=parquet needs the library pyarrow, which is not installed. {install_hint('parquet')}."
        ) from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"data.path: {path} is no parquet file that can be read: {error}") from error


def load_file(path: Path, columns: Columns, cache_dir: Path | None) -> FileIndex:
    """Return the index of a file, from the cache while the file does not change, else from its rows.

    Args:
        path: of the file.
        columns: what is read.
        cache_dir: where the cache lies; None = beside the file if that can be written, else the user's cache folder.

    Raises:
        ConfigError: the file lacks a column, or is no parquet file.
        OSError: it cannot be read.
    """
    stat = path.stat()
    text = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{columns}|{_FORMAT}"
    folder = default_cache_dir(path) if cache_dir is None else cache_dir
    cached = folder / f"{path.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
    kept = read_cache(cached)
    if kept is not None and kept.keys() >= {"table", "keys", "unfilled"}:
        return FileIndex(table=kept["table"], keys=kept["keys"], unfilled=int(kept["unfilled"]))
    index = scan_file(path, columns)
    parts = {"table": index.table, "keys": index.keys, "unfilled": np.array(index.unfilled)}
    write_cache(cached, parts, required=cache_dir is not None)
    return index


def scan_file(path: Path, columns: Columns) -> FileIndex:
    """Read the columns of every row, and the headers of the pictures that lie in them. See `load_file`."""
    rows, keys, number = [], [], 0
    with open_parquet(path) as file:
        check_columns(path, file.schema_arrow.names, columns)
        for group in range(file.num_row_groups):
            for place, values in enumerate(read_rows(file, group, columns.names())):
                number += 1
                image, name = picture_of(values[columns.image])
                if (image or name) and (columns.caption is None or values[columns.caption]):
                    rows.append((group, *_upright_size(image, values, columns), place, len(image) if image else -1))
                    keys.append((name or f"{path.name}/{number - 1:08d}").encode(errors="replace"))
    table = np.array(rows, dtype=PARQUET_FIELDS)
    return FileIndex(table=table, keys=np.array(keys, dtype=bytes), unfilled=number - len(rows))


def read_rows(file: Any, group: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a row group, some at a time, with these columns."""
    for batch in file.read_row_group(group, columns=list(names), use_threads=False).to_batches(_BATCH):
        try:
            yield from batch.to_pylist()
        except (ValueError, OverflowError):  # a text that is not UTF-8, a date beyond all calendars
            yield from (_plain_row(batch.slice(row, 1)) for row in range(len(batch)))


def _plain_row(row: Any) -> dict[str, Any]:
    """Return a batch of one row as values, None in the place of those that Python does not have."""
    values: dict[str, Any] = {}
    for name in row.schema.names:
        try:
            values[name] = row.column(name)[0].as_py()
        except (ValueError, OverflowError):
            values[name] = None
    return values


def check_columns(path: Path, found: Sequence[str], columns: Columns) -> None:
    """Check that a file has the columns that are asked for.

    Raises:
        ConfigError: it has not.
    """
    for key in ("image", "caption", "width", "height"):
        name = getattr(columns, key)
        if name is not None and name not in found:
            raise ConfigError(f"data.{key}_column={name} is not among the columns of {path}: {', '.join(found)}")


def picture_of(value: Any) -> tuple[bytes | None, str]:
    """Return an encoded picture, or None, and its path, empty where it has none.

    Raises:
        ConfigError: the value is neither.
    """
    if isinstance(value, Mapping):
        return value.get("bytes"), value.get("path") or ""
    if isinstance(value, str):
        return None, value
    if value is None or isinstance(value, bytes):
        return value, ""
    raise ConfigError(
        f"data.image_column holds {type(value).__name__}: encoded pictures, paths, or {{bytes, path}} are read"
    )


def _upright_size(image: bytes | None, values: Mapping[str, Any], columns: Columns) -> tuple[int, int]:
    """Return the size of a picture from its columns or its header; (0, 0) where it has none, or lies in a file."""
    if columns.width is not None and columns.height is not None:
        return values[columns.width] or 0, values[columns.height] or 0
    try:
        return (0, 0) if image is None else upright_size(image)
    except UnreadableSampleError:
        return 0, 0


class RowGroups:
    """The row groups read last. A process that gets a copy, by fork or pickle, reads its own.

    Args:
        capacity: how many are kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[tuple[Path, int], Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_capacity": self._capacity, "_kept": OrderedDict()}

    def row(self, path: Path, group: int, row: int, names: Sequence[str] | None) -> dict[str, Any]:
        """Return one row by column.

        Args:
            path: of the file.
            group: number of the row group in the file.
            row: number of the row in the group.
            names: columns, the same in every call; None = all.

        Raises:
            UnreadableSampleError: the row group is damaged.
            OSError: the file cannot be read.
        """
        if (path, group) not in self._kept:
            while len(self._kept) >= self._capacity:
                self._kept.popitem(last=False)
            self._kept[path, group] = _read_group(path, group, names)
        self._kept.move_to_end((path, group))
        return _plain_row(self._kept[path, group].slice(row, 1))


def _read_group(path: Path, group: int, names: Sequence[str] | None) -> Any:
    import pyarrow

    try:
        with open_parquet(path) as file:
            return file.read_row_group(group, columns=None if names is None else list(names), use_threads=False)
    except (pyarrow.ArrowException, ConfigError) as error:
        raise UnreadableSampleError(f"row group {group} of {path} is damaged: {error}") from error
