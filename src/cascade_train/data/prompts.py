"""Prompts from files: `@prompts.txt` with one a line, or a column of a table, `@captions.csv:caption`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import bounded_lines, open_regular, parsing

FILE = "@"
"""What a prompt that names a file begins with; a prompt that itself begins so has it twice."""

COLUMNS = ("caption", "prompt", "text")
"""Names of the column that is read where none is named, in this order, in any case."""

PARQUET, TEXT = ".parquet", ".txt"

NAMED_FILE = re.compile(r"[^@\s]\S*\.(txt|csv|tsv|jsonl|ndjson|parquet)(:\w+)?", re.IGNORECASE)

Row = tuple[Callable[[], str], Mapping[str, Any]]  # its place as text, and its values by column


def read_prompts(value: Any, *, key: str = "prompts") -> list[str]:
    """Prompts that an argument names: none, one, or a list, each a text or a file of them.

    `@prompts.txt` has one a line; `@captions.csv` (tsv, jsonl, ndjson, parquet) one a row, in the column behind a
    colon, else in `caption`, `prompt` or `text`, else in the only one. `@@` begins a prompt with a `@`. A ConfigError
    names `key`, file and line.
    """
    if value is None:
        return []
    entries = [value] if isinstance(value, str) or not isinstance(value, Iterable) else value
    return [prompt for entry in entries for prompt in _prompts_of(str(entry), key)]


def _prompts_of(text: str, key: str) -> list[str]:
    if NAMED_FILE.fullmatch(text):
        raise ConfigError(f"{key}={text} names a file. Write {key}={FILE}{text}; as a prompt, {key}='\"{text} \"'")
    if not text.startswith(FILE):
        return [text]
    if text.startswith(2 * FILE):
        return [text.removeprefix(FILE)]
    path, column = _place(text.removeprefix(FILE))
    where = f"{key}={FILE}{path}"
    if not _is_file(path):
        remedy = f"A prompt that itself begins with {FILE} is written {FILE}{text}"
        raise ConfigError(f"{where}: there is no such file; paths are relative to {Path.cwd()}. {remedy}.")
    kind = path.suffix.lower()
    if kind == TEXT and column is not None:
        raise ConfigError(f"{where}:{column}: a .txt has a prompt in each line and no columns; leave out :{column}.")
    prompts = list(_lines(path, where) if kind == TEXT else _cells(path, column, where))
    if not prompts:
        raise ConfigError(f"{where}: holds no prompt. Write one in each line, or give another file.")
    return prompts


def _place(named: str) -> tuple[Path, str | None]:
    """Path and the column behind the last colon of a text that is no file itself."""
    whole = Path(named).expanduser()
    path, colon, column = named.rpartition(":")
    return (Path(path).expanduser(), column) if colon and not _is_file(whole) else (whole, None)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # longer than a name can be
        return False


def _lines(path: Path, where: str) -> Iterator[str]:
    with open_regular(path) as file:
        for number, line in enumerate(bounded_lines(file, where), start=1):
            with parsing(f"{where}, line {number}:", "is not UTF-8", "save the file as UTF-8"):
                text = line.decode("utf-8-sig").strip()
            if text:
                yield text


def _cells(path: Path, column: str | None, where: str) -> Iterator[str]:
    """Yield the texts of one column of a table; the first row decides which it is."""
    chosen: str | None = None
    for place, values in _rows(path, column, where):
        chosen = _column(values, column, where) if chosen is None else chosen
        value = values.get(chosen)
        text = value[0] if isinstance(value, list) and value else value
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{where}, {place()}: {chosen} holds no prompt: {value!r:.60}. Mend or remove the row.")
        yield text.strip()


def _rows(path: Path, column: str | None, where: str) -> Iterator[Row]:
    from cascade_train.data import parquet, table  # heavy: numpy

    kind = path.suffix.lower()
    if kind == PARQUET:
        with parquet.open_parquet(path, key=where) as file:
            names = list(file.schema_arrow.names)
            column = _column(dict.fromkeys(names), column, where)
            groups = (parquet.read_rows(file, group, [column]) for group in range(file.num_row_groups))
            for number, values in enumerate(chain.from_iterable(groups), start=1):
                yield partial("row {}".format, number), values
    elif kind in table.DELIMITERS:
        for start, _, row in table.TableFile(path, key=where, whole=True).rows():
            yield partial(_line_at, path, start), row
    else:
        known = ", ".join((TEXT, *table.DELIMITERS, PARQUET))
        raise ConfigError(f"{where}: is no file that prompts are read from. Give one ending in {known}.")


def _line_at(path: Path, start: int) -> str:
    with open_regular(path) as file:
        return f"line {1 + sum(1 for _ in takewhile(lambda _: file.tell() <= start, file))}"


def _column(columns: Mapping[str, Any], named: str | None, where: str) -> str:
    """Column that is named, else the one that a caption is looked for in."""
    has = list(columns)
    if named is not None and named not in has:
        raise ConfigError(f"{where}: has no column {named}; it has {', '.join(has) or 'none'}. Name one behind a colon")
    candidates = [name for wanted in COLUMNS for name in has if name.lower() == wanted] if named is None else [named]
    if not candidates and len(has) == 1 and ";" in has[0]:
        raise ConfigError(f"{where}: its one column is {has[0]!r}; cells of a .csv are separated by commas: save it so")
    if not candidates and len(has) != 1:
        raise ConfigError(f"{where}: which column holds the prompts? It has {', '.join(has)}. Name one: {where}:<name>")
    return (candidates or has)[0]
