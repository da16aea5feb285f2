"""Captioned pictures in parquet files, in their columns or named by them; pyarrow is imported to open a file."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cascade_train.data.decoding.decode import upright_size
from cascade_train.data.index.cache import cache_file, default_cache_dir, read_cache, write_cache
from cascade_train.data.index.rows import LONGEST_KEY, ROW_FIELDS, checksum, combine, text_checksum
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.data.table import TableRows, TableSource, actual_name
from cascade_train.data.tar.storage import PerProcess
from cascade_train.errors import ConfigError, install_hint
from cascade_train.files.run_folder import walk_data
from cascade_train.files.untrusted import open_regular, parsing

PARQUET_FIELDS = [*ROW_FIELDS, ("row", "<i4"), ("bytes", "<i8")]
"""Of a row: `shard` is its row group, `row` its place in it, `bytes` those of its picture."""

MUCH_MEMORY = 2 * 1024**3
"""Bytes of row groups in one worker that are worth a warning."""

_FORMAT = 1
_BATCH = 64  # rows that become Python values at once
_log = logging.getLogger(__name__)


class Columns(NamedTuple):
    """Names of the columns that are read; as a text, part of the name of cached indexes."""

    image: str
    caption: str | None
    width: str | None
    height: str | None


@dataclass(kw_only=True)
class Parquet(TableSource):
    """Rows of parquet files. A row group is read whole, and what the window mixes stays in memory, in every worker."""

    shard_name = "{0}#{1}"
    width_column: str | None
    height_column: str | None

    def __post_init__(self) -> None:
        if (self.width_column is None) != (self.height_column is None):
            raise ValueError("data.width_column and data.height_column belong together: set both, or none")
        super().__post_init__()
        self._columns = Columns(self.image_column, self.caption_column, self.width_column, self.height_column)
        self._kept = PerProcess[OrderedDict[tuple[Path, int], Any]](OrderedDict)  # row groups, the last read at the end
        self._gives_sizes = self.width_column is not None

    def check(self) -> None:
        """See `Source.check`: the files, and the columns of the first."""
        first = self._find_files()[0]
        with open_parquet(first) as file:
            self._check_columns(first, file.schema_arrow.names)

    def _find_files(self) -> list[Path]:
        paths = []
        for path in self._paths:
            files = [folder / name for folder, names in walk_data(path) for name in names] if path.is_dir() else [path]
            tables = sorted(file for file in files if file.suffix == ".parquet" or file == path)
            if not tables or not tables[0].is_file():
                text = f"data.path={path} is no parquet file, nor a folder that holds some"
                raise ConfigError(f"{text}; paths are relative to {Path.cwd()}")
            paths += tables
        return paths

    def _tables(self) -> list[Path]:
        paths, sizes = self._find_files(), []
        for path in paths:
            with open_parquet(path) as file:
                self._check_columns(path, file.schema_arrow.names)
                sizes += [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
        kept = sum(sorted(sizes)[-self.shuffle_window_shards - 1 :])
        _log.log(
            logging.WARNING if kept > MUCH_MEMORY else logging.INFO,
            "%d row groups of up to %.0f MiB: each worker keeps up to %.1f GiB of them (data.shuffle_window_shards=%d"
            " and one); files written with fewer rows in a group need less.",
            len(sizes), max(sizes, default=0) / 2**20, kept / 2**30, self.shuffle_window_shards,
        )  # fmt: skip
        return paths

    def _scan(self, path: Path) -> TableRows:
        arrays = load_file(path, self._columns, self._cache_dir)
        table, keys = arrays["table"], arrays["keys"]
        return TableRows(
            table=table,
            keys=keys,
            names=[actual_name(self._root(path), key.decode()) for key in keys[table["bytes"] < 0].tolist()],
            unfilled=int(arrays["unfilled"]),
            verdicts=self._verdicts(path, table),
            content=combine(*arrays["checksums"].T),
        )

    def _verdicts(self, path: Path, table: np.ndarray) -> np.ndarray:
        verdicts = np.zeros((len(table), 1 + len(self._filters)), dtype=np.int64)
        if not len(self._filters):
            return verdicts
        wanted = {key for row_filter in self._filters.filters for key in row_filter.keys}
        with open_parquet(path) as file:
            names = [name for name in file.schema_arrow.names if name in wanted]
            edges = np.searchsorted(table["shard"], np.arange(file.num_row_groups + 1)).tolist()
            for group, (first, end) in enumerate(itertools.pairwise(edges)):
                rows = list(read_rows(file, group, names)) if names else []
                for place in range(first, end):
                    values = _without_none(rows[table["row"][place]]) if rows else {}
                    verdicts[place] = self._filters.judge(values)
        return verdicts

    def read(self, row: int) -> RawSample:
        """See `Source.read`; a row group is read whole, and stays in memory for a while."""
        entry = self._index.table[row]
        path, group = self._shards[entry["shard"]]
        values = _plain_row(self._row_group(path, group).slice(int(entry["row"]), 1))
        image, name = picture_of(values[self.image_column])
        if image is None:
            image = self.limits.read(self._root(path) / actual_name(self._root(path), name), "image")
        self.limits.check("image", len(image))
        return RawSample(
            image=image,
            caption=self._caption(values),
            caption_from=f"column {self.caption_column}",
            key=self._index.name(row),
            values={key: value for key, value in _without_none(values).items() if key != self.image_column},
        )

    def _row_group(self, path: Path, group: int) -> Any:
        """A row group, kept in memory or read; an UnreadableSampleError if it is damaged."""
        kept = self._kept()
        if (path, group) not in kept:
            while len(kept) > self.shuffle_window_shards:
                kept.popitem(last=False)
            names = None if self.captions.needs_values else list(filter(None, self._columns))
            kept[path, group] = _read_group(path, group, names)
        kept.move_to_end((path, group))
        return kept[path, group]


@contextmanager
def open_parquet(path: Path, *, key: str = "data.path") -> Iterator[Any]:
    """Open a file with pyarrow; a ConfigError where that is not installed, or what `key` names is no parquet file."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        where = "data=parquet" if key == "data.path" else key
        raise ConfigError(f"{where} needs the library pyarrow. {install_hint('parquet')}.") from error
    with parsing(f"{key}: {path}", "is no parquet file that can be read"):
        open_regular(path).close()  # no pipe, which pyarrow would wait for
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file


def load_file(path: Path, columns: Columns, cache_dir: Path | None) -> Mapping[str, np.ndarray]:
    """Call `scan_file`, cached while the file is unchanged."""
    stat = path.stat()
    text = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{columns}|{_FORMAT}"
    cached = cache_file(default_cache_dir(path) if cache_dir is None else cache_dir, path.stem, text)
    kept = read_cache(cached)
    if kept is None or not kept.keys() >= {"table", "keys", "unfilled", "checksums"}:
        kept = scan_file(path, columns)
        write_cache(cached, kept, required=cache_dir is not None)
    return kept


def scan_file(path: Path, columns: Columns) -> dict[str, np.ndarray]:
    """Read the columns of every row, and the headers of the pictures that lie in them; else a ConfigError.

    Returns `table`, (N,) with the fields of `PARQUET_FIELDS`, -1 bytes where the picture is a file; `keys`, (N,) bytes,
    the picture's path where it has one; `unfilled`, the number of rows that are left out, without a picture or a
    caption; `checksums`, (N, 2) int64, of pictures and captions.
    """
    rows, keys, checksums, number, names = [], [], list[tuple[int, int]](), 0, list(filter(None, columns))
    with open_parquet(path) as file:
        for group in range(file.num_row_groups):
            for place, values in enumerate(read_rows(file, group, names)):
                image, name = picture_of(values[columns.image])
                if (image or name) and (columns.caption is None or values[columns.caption]):
                    rows.append((group, *_upright_size(image, values, columns), place, len(image) if image else -1))
                    encoded, caption = image or b"", values.get(columns.caption or "")
                    checksums.append((checksum(encoded, len(encoded)), text_checksum(caption)))
                    keys.append((name or f"{path.name}/{number:08d}").encode(errors="replace"))
                number += 1
    return {
        "table": np.array(rows, dtype=PARQUET_FIELDS),
        "keys": np.array(keys, dtype=bytes),
        "unfilled": np.array(number - len(rows)),
        "checksums": np.array(checksums, dtype=np.int64).reshape(-1, 2),
    }


def read_rows(file: Any, group: int, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a row group, with these columns."""
    for batch in file.read_row_group(group, columns=names, use_threads=False).to_batches(_BATCH):
        try:
            yield from batch.to_pylist()
        except (ValueError, OverflowError):  # a text that is not UTF-8, a date beyond all calendars
            yield from (_plain_row(batch.slice(row, 1)) for row in range(len(batch)))


def _plain_row(row: Any) -> dict[str, Any]:
    """A batch of one row as values, None instead of those that Python does not have."""
    values = dict.fromkeys(row.schema.names)
    for name in values:
        with suppress(ValueError, OverflowError):
            values[name] = row.column(name)[0].as_py()
    return values


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def picture_of(value: Any) -> tuple[bytes | None, str]:
    """An encoded picture, or None, and its path, empty where it has none."""
    parts = value if isinstance(value, Mapping) else {"path" if isinstance(value, str) else "bytes": value}
    image, path = parts.get("bytes"), parts.get("path") or ""
    if isinstance(image, bytes | None) and isinstance(path, str):
        return image, path if len(path) <= LONGEST_KEY else ""
    kind = type(value).__name__
    raise ConfigError(f"data.image_column holds {kind}: encoded pictures, paths, or {{bytes, path}} are read")


def _upright_size(image: bytes | None, values: Mapping[str, Any], columns: Columns) -> tuple[int, int]:
    """(width, height) from the columns or the header; (0, 0) where there is none, or the picture is a file."""
    if columns.width is not None and columns.height is not None:
        return _side(columns.width, values[columns.width]), _side(columns.height, values[columns.height])
    with suppress(UnreadableSampleError):
        return (0, 0) if image is None else upright_size(image)
    return 0, 0


def _side(column: str, value: Any) -> int:
    if value is None or value != value:  # NaN, as pandas writes it
        return 0
    with parsing(f"data.width_column, data.height_column: {column}", f"holds {value!r:.40}", "give sizes in pixels"):
        if not 0 <= (side := int(value)) < 2**31:
            raise ValueError("out of bounds")
        return side


def _read_group(path: Path, group: int, names: list[str] | None) -> Any:
    try:
        with open_parquet(path) as file:
            return file.read_row_group(group, columns=names, use_threads=False)
    except ConfigError as error:
        raise UnreadableSampleError(f"row group {group} of {path} is damaged: {error}") from error
