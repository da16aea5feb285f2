"""Pictures that a table (csv, tsv, jsonl) names, with their captions.

The rows of a table are read in order once, and later one by one at their places.
"""

from __future__ import annotations

import abc
import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cascade_train.data.file_source import TableRows, TableSource
from cascade_train.data.index.pictures import first_names
from cascade_train.data.index.rows import ROW_FIELDS
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import read_json

TABLE_FIELDS = [*ROW_FIELDS, ("bytes", "<i8"), ("row_start", "<i8"), ("row_bytes", "<i8")]


@dataclass(kw_only=True)
class Table(TableSource):
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

    mask_column: str | None

    def check(self) -> None:
        """See `Source.check`: the tables, and their columns."""
        wanted = {column for column in (self.image_column, self.caption_column, self.mask_column) if column is not None}
        for path in self._paths:
            columns: dict[str, None] = {}
            for _, _, values in table_file(path).rows():
                columns.update(dict.fromkeys(values))
                if wanted <= columns.keys():
                    break
            self._check_columns(path, columns)

    def _tables(self) -> list[Path]:
        self._files = {path: table_file(path) for path in self._paths}
        return self._paths

    def _scan(self, path: Path) -> TableRows:
        wanted = [column for column in (self.image_column, self.caption_column) if column is not None]
        places, names, verdicts = [], [], []
        columns: dict[str, None] = {}
        unfilled = 0
        for start, size, values in self._files[path].rows():
            columns.update(dict.fromkeys(values))
            if any(values.get(column) in (None, "", []) for column in wanted):
                unfilled += 1
                continue
            places.append((0, 0, 0, -1, start, size))
            names.append(str(values[self.image_column]))
            verdicts.append(self._filters.judge(_with_numbers(values)) if len(self._filters) else [])
        self._check_columns(path, columns)
        if not names:
            raise ConfigError(
                f"data.path={path} holds no row with a picture and a caption; {unfilled} lack one of them"
            )
        return TableRows(
            table=np.array(places, dtype=TABLE_FIELDS),
            keys=np.array([name.encode(errors="replace") for name in names]),
            names=names,
            unfilled=unfilled,
            verdicts=np.array(verdicts),
        )

    def _usable(self, path: Path, rows: TableRows) -> TableRows:
        usable = super()._usable(path, rows)
        if not len(usable.table):
            raise ConfigError(
                f"data.path={path}: none of {len(rows.names)} pictures is there: {first_names(rows.names)}; paths are"
                f" relative to {self._root(path)}, data.root= sets another folder"
            )
        return usable

    def read(self, row: int) -> RawSample:
        """Read the row of the table again, and the files that it names."""
        entry = self._index.table[row]
        path, _ = self._shards[entry["shard"]]
        values = self._files[path].read(int(entry["row_start"]), int(entry["row_bytes"]))
        root = self._root(path)
        mask = None if self.mask_column is None else values.get(self.mask_column)
        return RawSample(
            image=self.limits.read(root / str(values[self.image_column]), "image"),
            caption=self._caption(values),
            key=self._index.name(row),
            mask=self.limits.read(root / str(mask), "mask") if mask else None,
            values=values,
        )


class TableFile(abc.ABC):
    """A table in a file in UTF-8."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abc.abstractmethod
    def rows(self) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """Read start and size in bytes of each row, and its values by column; empty lines do not count.

        Raises:
            ConfigError: the file does not have the form of a table.
            OSError: it cannot be read.
        """

    @abc.abstractmethod
    def values(self, text: str) -> Mapping[str, Any]:
        """Return the values of a row by its text. Only after `rows` was begun.

        Raises:
            ValueError: the text is not a row.
        """

    def read(self, start: int, size: int) -> Mapping[str, Any]:
        """Read the row at a place that `rows` returned.

        Raises:
            UnreadableSampleError: the file changed, so that there is no row at this place.
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            file.seek(start)
            content = file.read(size)
        try:
            return self.values(content.decode())
        except ValueError as error:
            raise UnreadableSampleError(f"{self.path} has no row at byte {start}; it changed during the run") from error


class DelimitedFile(TableFile):
    """A file with the columns' names in its first row, and cells that may be quoted and span lines."""

    def __init__(self, path: Path, *, delimiter: str = ",") -> None:
        super().__init__(path)
        self.delimiter = delimiter

    def rows(self) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """See `TableFile`."""
        with self.path.open("rb") as file:
            lines = _Lines(file, self.path)
            reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
            try:
                self.columns = next(reader, [])
                start = lines.end
                for cells in reader:
                    if cells:
                        yield start, lines.end - start, self._by_column(cells)
                    start = lines.end
            except csv.Error as error:
                raise ConfigError(
                    f"data.path: {self.path}, line {reader.line_num}: {error}; cells with quotes or line ends must be"
                    " quoted"
                ) from error

    def values(self, text: str) -> Mapping[str, Any]:
        """See `TableFile`."""
        try:
            return self._by_column(next(csv.reader(text.splitlines(keepends=True), delimiter=self.delimiter)))
        except (csv.Error, StopIteration) as error:
            raise ValueError(str(error)) from error

    def _by_column(self, cells: list[str]) -> dict[str, str]:
        return dict(zip(self.columns, cells, strict=False))


class JsonLines(TableFile):
    """A file with a json mapping in every line."""

    def rows(self) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """See `TableFile`."""
        with self.path.open("rb") as file:
            lines = _Lines(file, self.path)
            start = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield start, lines.end - start, self.values(line)
                    except ValueError as error:
                        raise ConfigError(
                            f"data.path: {self.path}, line {number} is no json mapping, as {{...}}: {error}"
                        ) from error
                start = lines.end

    def values(self, text: str) -> Mapping[str, Any]:
        """See `TableFile`."""
        values = read_json(text.removeprefix("\ufeff"))
        if not isinstance(values, dict):
            raise ValueError(f"it is a {type(values).__name__}")
        return values


FORMATS: Mapping[str, Callable[[Path], TableFile]] = {
    ".csv": DelimitedFile,
    ".tsv": partial(DelimitedFile, delimiter="\t"),
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
}


def table_file(path: Path) -> TableFile:
    """Return the reader of a table, by its extension.

    Raises:
        ConfigError: the extension is unknown, or there is no such file.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"data.path={path} is no table that can be read: give a file ending in {', '.join(FORMATS)}")
    if not path.is_file():
        raise ConfigError(f"data.path={path} is not there; paths are relative to the current folder, {Path.cwd()}")
    return FORMATS[path.suffix.lower()](path)


class _Lines(Iterator[str]):
    """The lines of a file as text, and where the last one ended in bytes."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path, self.end = file, path, 0

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            raise StopIteration
        try:
            text = line.decode("utf-8-sig" if self.end == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.path: {self._path} is not UTF-8 after byte {self.end} ({error.reason})") from error
        self.end += len(line)
        return text


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
