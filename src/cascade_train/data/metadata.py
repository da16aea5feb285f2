"""The `metadata.jsonl` or `metadata.csv` of a folder: a row for each picture, as datasets and diffusers read them."""

from __future__ import annotations

import logging
import posixpath
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cascade_train.data.index.rows import first_names
from cascade_train.data.table import TableFile
from cascade_train.errors import ConfigError

NAMES = ("metadata.jsonl", "metadata.csv")
FILE_NAME, CAPTIONS = "file_name", ("text", "caption")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What such files say."""

    rows: Mapping[str, Mapping[str, Any]]  # by the name of the picture
    folders: tuple[str, ...]  # where files lie whose rows name pictures

    @classmethod
    def read(cls, root: Path, files: Sequence[str], pictures: Sequence[str]) -> Metadata:
        """Read files below a folder, and log which rows name none of the pictures; a ConfigError for a damaged file."""
        rows: dict[str, Mapping[str, Any]] = {}
        name_of, folders = {_normal(name): name for name in pictures}, []
        for file in files:
            folder, unread = posixpath.dirname(file), list[str]()
            for values in _rows(root / file):
                picture = name_of.get(_normal(posixpath.join(folder, str(values[FILE_NAME]).replace("\\", "/"))))
                if picture is None or picture in rows:
                    unread.append(str(values[FILE_NAME]))
                else:
                    rows[picture] = values
                folders.append(folder)
            if unread:
                text = "%s: %d rows name no picture, or one that has a row already, and are not read: %s"
                _log.warning(text, root / file, len(unread), first_names(unread))
        return cls(rows=rows, folders=tuple(dict.fromkeys(folders)))

    def covers(self, picture: str) -> bool:
        """Return whether a picture lies in or below a folder with such a file, which should then name it."""
        return any(not folder or picture.startswith(f"{folder}/") for folder in self.folders)


def caption_of(values: Mapping[str, Any]) -> str:
    """Return the caption of a row, several as its lines; empty where it has no text."""
    value = next((values[key] for key in CAPTIONS if values.get(key)), "")
    texts = value if isinstance(value, list) else [value]
    return "\n".join(text.strip() for text in texts if isinstance(text, str))


def _rows(path: Path) -> list[Mapping[str, Any]]:
    try:
        return [values for _, _, values in TableFile(path).rows() if values.get(FILE_NAME)]
    except ConfigError as error:
        raise ConfigError(f"{error}; data.metadata=false reads no such file") from error


def _normal(path: str) -> str:
    """Return a path in one form: systems compose accents or do not, and a table may have another form than a disk."""
    return unicodedata.normalize("NFC", posixpath.normpath(path))
