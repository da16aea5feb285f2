"""Rows of csv, tsv and jsonl files, read in order once, and later one by one at their places."""

from __future__ import annotations

import abc
import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cascade_train.data.sample import UnreadableSampleError
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import read_json


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row of a table.

    Attributes:
        start: its place in the file, in bytes.
        size: in bytes.
        values: by column.
    """

    start: int
    size: int
    values: Mapping[str, Any]


class TableFile(abc.ABC):
    """A table in a file.

    Args:
        path: of the file, in UTF-8.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @abc.abstractmethod
    def rows(self) -> Iterator[TableRow]:
        """Read the rows in their order; empty lines do not count.

        Raises:
            ConfigError: the file does not have the form of a table.
            OSError: it cannot be read.
        """

    @abc.abstractmethod
    def values(self, text: str) -> Mapping[str, Any]:
        """Return the values of a row by its text. Only after `rows` was begun.

        Raises:
            ValueError: the text is no row.
        """

    def read(self, start: int, size: int) -> Mapping[str, Any]:
        """Read the row at a place, known from `rows`.

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

    delimiter = ","

    def rows(self) -> Iterator[TableRow]:
        """See `TableFile`."""
        with self.path.open("rb") as file:
            lines = _Lines(file, self.path)
            reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
            try:
                self.columns = next(reader, [])
                start = lines.end
                for cells in reader:
                    if cells:
                        yield TableRow(start=start, size=lines.end - start, values=self._by_column(cells))
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


class TabFile(DelimitedFile):
    """A file with tabs between its cells."""

    delimiter = "\t"


class JsonLines(TableFile):
    """A file with a json mapping in every line."""

    def rows(self) -> Iterator[TableRow]:
        """See `TableFile`."""
        with self.path.open("rb") as file:
            lines = _Lines(file, self.path)
            start = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield TableRow(start=start, size=lines.end - start, values=self.values(line))
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


FORMATS: Mapping[str, type[TableFile]] = {
    ".csv": DelimitedFile,
    ".tsv": TabFile,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
}


def table_file(path: Path) -> TableFile:
    """Return the reader of a table, by the end of its name.

    Raises:
        ConfigError: it is no kind of table, or not there.
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
