"""The `metadata.jsonl` or `metadata.csv` of a folder: a row for each picture, as datasets and diffusers read them.

A row names its picture by `file_name`, relative to the file's own folder; `text` or `caption` is its caption.
"""

from __future__ import annotations

import hashlib
import json
import logging
import posixpath
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cascade_train.data.index.pictures import first_names
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.data.table import TableFile
from cascade_train.errors import ConfigError

NAMES = ("metadata.jsonl", "metadata.csv")
FILE_NAME, CAPTIONS = "file_name", ("text", "caption")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the row of a picture lies."""

    table: int  # number of the file
    start: int  # of the row, in bytes
    size: int
    has_caption: bool
    digest: bytes  # of its values


class Metadata:
    """The rows of all metadata files below a folder, by the name of their picture."""

    def __init__(self, root: Path, files: Sequence[str], pictures: Sequence[str]) -> None:
        """Read the files, and log which of their rows name none of the pictures; a ConfigError for a damaged file."""
        self.tables = [TableFile(root / name) for name in files]
        self.places: dict[str, Place] = {}
        self._folders: list[str] = []  # of the files that name pictures
        by_text = {_normal(name): name for name in pictures}
        for number, name in enumerate(files):
            try:
                self._scan(number, name, by_text)
            except ConfigError as error:
                raise ConfigError(f"{error}; data.metadata=false reads no such file") from error

    def _scan(self, number: int, name: str, by_text: Mapping[str, str]) -> None:
        absent, again, folder, names_any = list[str](), list[str](), posixpath.dirname(name), False
        for start, size, values in self.tables[number].rows():
            named = str(values.get(FILE_NAME) or "")
            names_any = names_any or bool(named)
            picture = by_text.get(_normal(posixpath.join(folder, named.replace("\\", "/"))))
            if picture is None or picture in self.places:
                (absent if picture is None else again).append(named or f"no {FILE_NAME}")
                continue
            digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).digest()
            has_caption = any(values.get(key) for key in CAPTIONS)
            self.places[picture] = Place(table=number, start=start, size=size, has_caption=has_caption, digest=digest)
        self._folders += [folder] if names_any else []
        for names, why in ((absent, "name no picture that is there"), (again, "name a picture that has one already")):
            if names:
                _log.warning("%s: %d rows %s and are not read: %s", name, len(names), why, first_names(names))

    def covers(self, picture: str) -> bool:
        """Return whether a picture lies in or below a folder with such a file, which should then name it."""
        return any(not folder or picture.startswith(f"{folder}/") for folder in self._folders)

    def values(self, place: Place) -> Mapping[str, Any]:
        """Return the values of a row; an UnreadableSampleError where its file changed."""
        return self.tables[place.table].read(place.start, place.size)


def caption_of(values: Mapping[str, Any]) -> str:
    """Return the caption of a row, several as its lines."""
    value = next((values[key] for key in CAPTIONS if values.get(key)), None)
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise UnreadableSampleError(f"its caption is no text: {value!r:.60}")
    return "\n".join(text.strip() for text in texts)


def _normal(path: str) -> str:
    """Return a path in one form: systems compose accents or do not, and a table may have another form than a disk."""
    return unicodedata.normalize("NFC", posixpath.normpath(path))
