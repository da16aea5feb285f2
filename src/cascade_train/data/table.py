"""Rows of tables as a source; pictures that a table (csv, tsv, jsonl) names; such tables, also those beside pictures.

The rows of a table are read in order once, and later one by one at their offsets.
"""

from __future__ import annotations

import abc
import contextlib
import csv
import logging
import os
import posixpath
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from cascade_train.data.index.cache import load_checksums, load_picture_facts
from cascade_train.data.index.rows import ABSENT, LONGEST_KEY, ROW_FIELDS, Index, combine, first_names, text_checksum
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.data.source import FileSource
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import MAX_BYTES, bounded_lines, open_regular, parsing, read_json
from cascade_train.options import File, Order

DELIMITERS = {".csv": ",", ".tsv": "\t", ".jsonl": None, ".ndjson": None}
"""What separates the cells of a row, by a file's extension; None = each line is a json mapping."""

METADATA_FILES = ("metadata.jsonl", "metadata.csv")
"""A row for each picture of a folder, as datasets and diffusers read them: `file_name`, and `text` or `caption`."""

TABLE_FIELDS = [*ROW_FIELDS, ("bytes", "<i8"), ("row_start", "<i8"), ("row_bytes", "<i8")]
csv.field_size_limit(max(MAX_BYTES, csv.field_size_limit()))  # of cells, for the whole process; 128 KiB at first
_log = logging.getLogger(__name__)


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
        """Files of all tables."""

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
        has = list(found)
        for key in ("image_column", "caption_column", "mask_column", "width_column", "height_column"):
            column = getattr(self, key, None)
            if column is not None and column not in has:
                hint = "; columns are separated by commas" if len(has) == 1 and set(has[0]) & set(";\t|") else ""
                columns = ", ".join(has) or "no rows"
                raise ConfigError(f"data.{key}={column} is no column of {path}, which has {columns}{hint}")

    def _root(self, path: Path) -> Path:
        return path.parent if self.root is None else Path(self.root).expanduser()

    def _caption(self, values: Mapping[str, Any]) -> str:
        """Caption of a row, several as its lines."""
        if self.caption_column is None:
            return ""
        value = values[self.caption_column]
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UnreadableSampleError(f"its caption is no text: {value!r:.60}")
        return "\n".join(text.strip() for text in texts)


@dataclass(kw_only=True)
class Table(TableSource):
    """Rows of csv, tsv or jsonl tables, each with the path of a picture and one or several captions."""

    mask_column: str | None

    def check(self) -> None:
        """See `Source.check`: the tables, and their columns."""
        wanted = {column for column in (self.image_column, self.caption_column, self.mask_column) if column is not None}
        for path in self._paths:
            columns: dict[str, None] = {}
            for _, _, values in TableFile(path).rows():
                columns.update(dict.fromkeys(values))
                if wanted <= columns.keys():
                    break
            self._check_columns(path, columns)

    def _tables(self) -> list[Path]:
        self._files = {path: TableFile(path) for path in self._paths}
        return self._paths

    def _scan(self, path: Path) -> TableRows:
        wanted = [column for column in (self.image_column, self.caption_column) if column is not None]
        places, names, verdicts, texts, masks = [], [], [], [], []
        columns, unfilled = dict[str, None](), 0
        for start, size, values in self._files[path].rows():
            columns.update(dict.fromkeys(values))
            name = actual_name(self._root(path), str(values.get(self.image_column)))
            if any(values.get(column) in (None, "", []) for column in wanted) or len(name) > LONGEST_KEY:
                unfilled += 1
                continue
            places.append((0, 0, 0, -1, start, size))
            names.append(name)
            texts.append(text_checksum(values if self.captions.needs_values else values.get(self.caption_column or "")))
            masks.append(actual_name(self._root(path), str(values.get(self.mask_column or "") or "")))
            if len(self._filters):
                verdicts.append(self._filters.judge({key: number_of(value) for key, value in values.items()}))
        self._check_columns(path, columns)
        if not names:
            raise ConfigError(f"data.path={path} holds no row with a picture and a caption; {unfilled} lack one")
        parts = [load_checksums(path, self._root(path), masks, self._cache_dir)] if any(masks) else []
        rows = TableRows(
            table=np.array(places, dtype=TABLE_FIELDS),
            keys=np.array([name.encode(errors="replace") for name in names]),
            names=names,
            unfilled=unfilled,
            verdicts=np.array(verdicts) if verdicts else np.zeros((len(names), 0)),
            content=combine(np.array(texts), *parts),
        )
        has_mask = np.array([not name for name in masks]) | (parts[0] != ABSENT) if parts else np.ones(len(masks), bool)
        return rows if has_mask.all() else self._with_masks(path, rows, masks, has_mask)

    def _with_masks(self, path: Path, rows: TableRows, masks: Sequence[str], has_mask: np.ndarray) -> TableRows:
        """Leave out rows whose masks are not there; a ConfigError where that is all."""
        missing = first_names(name for name, there in zip(masks, has_mask.tolist(), strict=True) if not there)
        if not has_mask.any():
            text = f"data.path={path}: none of the masks in column {self.mask_column} is there: {missing}"
            raise ConfigError(f"{text}; paths are relative to {self._root(path)}, see data.root")
        _log.warning("%s: left out %d rows whose masks are not there: %s", path, int((~has_mask).sum()), missing)
        names = [name for name, there in zip(rows.names, has_mask.tolist(), strict=True) if there]
        kept = {name: getattr(rows, name)[has_mask] for name in ("table", "keys", "verdicts", "content")}
        return replace(rows, names=names, **kept)

    def _usable(self, path: Path, rows: TableRows) -> TableRows:
        usable = super()._usable(path, rows)
        if not len(usable.table):
            text = f"data.path={path}: none of {len(rows.names)} pictures is there: {first_names(rows.names)}"
            raise ConfigError(f"{text}; paths are relative to {self._root(path)}, see data.root")
        return usable

    def read(self, row: int) -> RawSample:
        """See `Source.read`: read the row of the table again, and the files that it names."""
        entry = self._index.table[row]
        path, _ = self._shards[entry["shard"]]
        values = self._files[path].read(int(entry["row_start"]), int(entry["row_bytes"]))
        root = self._root(path)
        mask = None if self.mask_column is None else values.get(self.mask_column)
        return RawSample(
            image=self.limits.read(root / actual_name(root, str(values[self.image_column])), "image"),
            caption=self._caption(values),
            caption_from=f"column {self.caption_column}",
            key=self._index.name(row),
            mask=self.limits.read(root / actual_name(root, str(mask)), "mask") if mask else None,
            values=values,
        )


class TableFile:
    """A table in a file in UTF-8; its cells may be quoted and span lines."""

    def __init__(self, path: Path, *, key: str = "data.path", whole: bool = False) -> None:
        """Raise a ConfigError, naming `key`, where the extension is unknown, or there is no such file.

        `whole`: a row with more cells than there are columns is no row of the table; else they do not count.
        """
        if path.suffix.lower() not in DELIMITERS:
            known = ", ".join(DELIMITERS)
            raise ConfigError(f"{key}={path} is no table that can be read: give a file ending in {known}")
        if not path.is_file():
            raise ConfigError(f"{key}={path} is not there; paths are relative to the current folder, {Path.cwd()}")
        self.path, self._key, self._delimiter, self._whole = path, key, DELIMITERS[path.suffix.lower()], whole

    def rows(self) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """Yield offset and size in bytes of each row, and its values by column; a ConfigError for another form."""
        with open_regular(self.path) as file:
            lines, start = self._lines(file), 0
            for values in self._json_rows(lines) if self._delimiter is None else self._cell_rows(lines):
                if values is not None:
                    yield start, file.tell() - start, values
                start = file.tell()

    def _lines(self, file: BinaryIO) -> Iterator[str]:
        start = 0
        for line in bounded_lines(file, f"{self._key}: {self.path}"):
            with parsing(f"{self._key}: {self.path}", f"is not UTF-8 after byte {start}", "save it as UTF-8"):
                text = line.decode("utf-8-sig" if start == 0 else "utf-8")
            yield text
            start += len(line)

    def _json_rows(self, lines: Iterator[str]) -> Iterator[Mapping[str, Any] | None]:
        for number, line in enumerate(lines, start=1):
            with parsing(f"{self._key}: {self.path}, line {number}", "is no json mapping", "write one, as {...}"):
                values = self._values(line) if line.strip() else None
            yield values

    def _cell_rows(self, lines: Iterator[str]) -> Iterator[Mapping[str, Any] | None]:
        reader = csv.reader(lines, delimiter=str(self._delimiter), strict=True)
        try:
            self._columns = next((cells for cells in reader if any(map(str.strip, cells))), [])
            yield None
            for cells in reader:
                if self._whole and any(cells[len(self._columns) :]):
                    sizes = f"has {len(cells)} cells, and the first line names {len(self._columns)} columns"
                    remedy = f"a cell with a {self._delimiter!r} in it must be quoted"
                    raise ConfigError(f"{self._key}: {self.path}, line {reader.line_num} {sizes}; {remedy}")
                yield dict(zip(self._columns, cells, strict=False)) if cells else None
        except csv.Error as error:
            where = f"{self._key}: {self.path}, line {reader.line_num}"
            raise ConfigError(f"{where}: {error}; cells with quotes or line ends must be quoted") from error

    def read(self, start: int, size: int) -> Mapping[str, Any]:
        """Read the row at an offset that `rows` returned; an UnreadableSampleError where the file changed."""
        with self.path.open("rb") as file:
            file.seek(start)
            content = file.read(size)
        try:
            return self._values(content.decode())
        except (ValueError, csv.Error, StopIteration) as error:
            raise UnreadableSampleError(f"{self.path} has no row at byte {start}; it changed during the run") from error

    def _values(self, text: str) -> Mapping[str, Any]:
        """Values of a row by its text; of cells only once their columns' names were read."""
        if self._delimiter is not None:
            cells = next(csv.reader([text], delimiter=self._delimiter))
            return dict(zip(self._columns, cells, strict=False))
        values = read_json(text.removeprefix("\ufeff"))
        if not isinstance(values, dict):
            raise ValueError(f"it is a {type(values).__name__}")
        return values


def number_of(value: Any) -> Any:
    """A text that is a number as such, as filters compare it, and anything else as it is."""
    for kind in (int, float) if isinstance(value, str) else ():
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def read_metadata_files(
    root: Path, files: Sequence[str], pictures: Sequence[str]
) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """Rows of the `METADATA_FILES` below a folder by their picture, and the files' folders."""
    rows_of: dict[str, Mapping[str, Any]] = {}
    name_of, folders = {_normalize_path(name): name for name in pictures}, []
    for file in files:
        folder, unread = posixpath.dirname(file), list[str]()
        try:
            rows = [values for _, _, values in TableFile(root / file).rows() if values.get("file_name")]
        except ConfigError as error:
            raise ConfigError(f"{error}; data.metadata=false reads no such file") from error
        for values in rows:
            name = str(values["file_name"])
            picture = name_of.get(_normalize_path(posixpath.join(folder, name.replace("\\", "/"))))
            if picture is None or picture in rows_of:
                unread.append(name)
            else:
                rows_of[picture] = values
        folders += [folder] if rows else []
        if unread:
            text = "%s: %d rows name no picture, or one that has a row already, and are not read: %s"
            _log.warning(text, root / file, len(unread), first_names(unread))
    return rows_of, folders


def actual_name(root: Path, name: str) -> str:
    """A path below a folder as the disk has it: a table may be from Windows, or have its accents in another form."""
    if (name.isascii() and "\\" not in name) or os.path.lexists(root / name):
        return name
    place = root / ("/" if name.startswith("/") else "")
    for part in name.replace("\\", "/").split("/"):
        forms = [part, *(unicodedata.normalize(form, part) for form in ("NFC", "NFD"))]
        place /= next((form for form in forms if os.path.lexists(place / form)), part)
    return str(place) if os.path.lexists(place) else name


def caption_of(values: Mapping[str, Any]) -> str:
    """Caption of a row of a metadata file, several as its lines; empty where it has no text."""
    value = values.get("text") or values.get("caption")
    texts = value if isinstance(value, list) else [value]
    return "\n".join(text.strip() for text in texts if isinstance(text, str))


def _normalize_path(path: str) -> str:
    """A path in one form: systems compose accents or do not, and a table may have another form than a disk."""
    return unicodedata.normalize("NFC", posixpath.normpath(path))
