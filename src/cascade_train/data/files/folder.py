"""The pictures of a folder and what lies beside each: captions, values, masks, and how often it comes.

Which of them take part is decided in folder.py.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cascade_train.data.files.limits import FileLimits
from cascade_train.data.files.pictures import EXTENSIONS
from cascade_train.data.index.row_filter import read_metadata
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import read_yaml

MULTIPLY = "multiply.txt"
CAPTION_FILES = ("", ".txt", ".caption")
"""Where a caption comes from, by the number that the index holds: the picture's name, or a file beside it."""
VALUE_FILES = ("", ".json", ".yaml", ".yml")
"""Where more about a picture comes from, by the number that the index holds; the first means nowhere."""
MASK = ".mask.png"
_SHOWN = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PictureFile:
    """A picture in a folder and what lies beside it.

    Attributes:
        name: relative to the root, with slashes.
        factor: how often it comes in an epoch, from the folder's `multiply.txt`.
        caption: position in `CAPTION_FILES`.
        values: position in `VALUE_FILES`.
        mask: whether it has a mask.
    """

    name: str
    factor: float
    caption: int
    values: int
    mask: bool


def find_pictures(root: Path) -> Iterator[PictureFile]:
    """Yield the pictures below a folder, folders and names in the order of their code points.

    Links to folders are followed; a folder that is reached again, as by a loop of links, counts once.

    Raises:
        ConfigError: there is no such folder, or a `multiply.txt` is no number.
        OSError: a folder cannot be read.
    """
    if not root.is_dir():
        raise ConfigError(f"data.path={root} is not a folder; paths are relative to the current folder, {Path.cwd()}")
    seen: set[tuple[int, int]] = set()
    strange: list[str] = []
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_raise):
        stat = Path(folder).stat()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if (stat.st_dev, stat.st_ino) in seen:
            folders.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        prefix = "" if Path(folder) == root else f"{Path(folder).relative_to(root).as_posix()}/"
        strange += [name for name in names if not _is_utf8(prefix + name)]
        visible = sorted(name for name in names if not name.startswith(".") and _is_utf8(prefix + name))
        yield from _in_one_folder(Path(folder), prefix, visible)
    if strange:
        _log.warning("%s: left out %d files whose names are not UTF-8: %s", root, len(strange), ascii(strange[:_SHOWN]))


def caption_of_name(name: str) -> str:
    """Return the caption that a file's name is: all before its first underscore, without the extension."""
    return Path(name).stem.partition("_")[0].strip()


def read_caption(path: Path, limits: FileLimits) -> str:
    """Return the text of a caption file.

    Raises:
        UnreadableSampleError: it is not UTF-8, or too large.
    """
    try:
        return limits.read(path, "caption").decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise UnreadableSampleError(f"the caption is not UTF-8: {error}") from error


def read_values(path: Path, limits: FileLimits) -> Mapping[str, Any] | None:
    """Return what a json or yaml file says; None where it is no mapping that can be read, or too large."""
    try:
        content = limits.read(path, path.suffix[1:])
    except UnreadableSampleError:
        return None
    values = read_metadata(content)
    if values is None and path.suffix != ".json":
        try:
            values = read_yaml(content)
        except ValueError:
            return None
    return values if isinstance(values, Mapping) else None


def beside(name: str, extension: str) -> str:
    """Return the name of the file with another extension beside a picture."""
    return f"{name.rpartition('.')[0]}{extension}"


def _in_one_folder(folder: Path, prefix: str, names: list[str]) -> Iterator[PictureFile]:
    there = set(names)
    factor = _read_factor(folder / MULTIPLY) if MULTIPLY in there else 1.0
    for name in names:
        stem, _, extension = name.rpartition(".")
        if stem and extension.lower() in EXTENSIONS and not name.endswith(MASK):
            yield PictureFile(
                name=prefix + name,
                factor=factor,
                caption=_first(stem, CAPTION_FILES, there),
                values=_first(stem, VALUE_FILES, there),
                mask=f"{stem}{MASK}" in there,
            )


def _first(stem: str, extensions: tuple[str, ...], there: set[str]) -> int:
    """Return the position of the first extension, beyond the first one, with which a file is there; else 0."""
    return next((i for i, extension in enumerate(extensions) if extension and stem + extension in there), 0)


def _read_factor(path: Path) -> float:
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise ConfigError(f"{path} holds {text[:20]!r}: write one number, 0 or more, such as 2 or 0.5")
    return factor


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _raise(error: OSError) -> None:
    raise error
