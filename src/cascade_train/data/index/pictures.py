"""The pictures of a folder and the folders below it, and the files that lie beside them."""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cascade_train.data.index.row_filter import read_metadata
from cascade_train.data.sample import FileLimits, UnreadableSampleError
from cascade_train.errors import ConfigError
from cascade_train.files.run_folder import walk_data
from cascade_train.files.untrusted import open_regular, parsing, read_yaml

EXTENSIONS = ("jpg", "jpeg", "jfif", "png", "webp", "bmp")  # of pictures, in any case

MULTIPLY = "multiply.txt"
CAPTION_FILES = ("", ".txt", ".caption")  # by the number in the index; the first is the picture's name
VALUE_FILES = ("", ".json", ".yaml", ".yml")  # by the number in the index; the first is none
MASK = ".mask.png"
_MASKS = (".mask", "-masklabel", "_mask", "-mask")
"""Endings of masks' names before the extension, in any case: as here, and as other trainers have them."""
_MAPS = tuple(
    mark + kind
    for mark in "-_."
    for kind in ("condlabel", "cond", "control", "depth", "canny", "pose", "normal", "seg")
)
"""Endings of control maps, which filters make here of pictures."""
_MOST_REPEATS = 10_000  # of each picture in an epoch
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PictureFile:
    """A picture in a folder and what lies beside it."""

    name: str  # relative to the root, with slashes
    factor: float  # how often it comes in an epoch, from the folder's `multiply.txt`
    caption: int  # position in `CAPTION_FILES`
    values: int  # position in `VALUE_FILES`
    mask: bool  # whether it has a mask
    aliases: Mapping[str, str] = field(default_factory=dict)  # `beside` names -> those of the disk, where they differ
    row: Mapping[str, Any] = field(default_factory=dict)  # what a metadata file says


def find_pictures(root: Path, others: list[str]) -> Iterator[PictureFile]:
    """Yield the pictures below a folder, folders and names in the order of their code points.

    `others` gets the names of visible files that belong to none of them. See `walk_data` for what is no data. A
    ConfigError for a missing folder or a wrong `multiply.txt`.
    """
    if not root.is_dir():
        other = f". Tars are read by: data=webdataset data.urls={root}" if root.suffix == ".tar" else ""
        other = f". Give the folder of the pictures: data.path={root.parent}" if "*" in root.name else other
        raise ConfigError(
            f"data.path={root} is not a folder; paths are relative to the current folder, {Path.cwd()}{other}"
        )
    strange, maps = list[str](), list[str]()
    for folder, names in walk_data(root):
        prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
        strange += [name for name in names if not _is_utf8(prefix + name)]
        yield from _in_one_folder(folder, prefix, [name for name in names if _is_utf8(prefix + name)], others, maps)
    if maps:
        text = "%s: %d control maps beside pictures are not read, since task.filter makes them (%s); a .txt trains one"
        _log.warning(text, root, len(maps), ", ".join(maps[:5]))
    if strange:
        _log.warning("%s: left out %d files whose names are not UTF-8: %s", root, len(strange), ascii(strange[:5]))


def caption_of_name(name: str) -> str:
    """Return the part of a file name before its first underscore, without the extension."""
    return Path(name).stem.partition("_")[0].strip()


def read_values(path: Path, limits: FileLimits) -> Mapping[str, Any] | None:
    """Return the values of a json or yaml file; None where it is no mapping that can be read, or too large."""
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


def counted(names: Sequence[str]) -> str:
    """Return how many files of each kind there are, and the first of each: `3 .gif (a.gif)`."""
    first: dict[str, str] = {}
    kinds = Counter(Path(name).suffix.lower() for name in names if first.setdefault(Path(name).suffix.lower(), name))
    return ", ".join(f"{count} {kind or 'without extension'} ({first[kind]})" for kind, count in kinds.most_common())


def _in_one_folder(
    folder: Path, prefix: str, names: list[str], others: list[str], maps: list[str]
) -> Iterator[PictureFile]:
    there = {_plain(name): name for name in names} | {name: name for name in names}
    factor = _read_factor(folder / MULTIPLY) if MULTIPLY in there else 1.0
    pictures = {name: _plain(name).rpartition(".")[0] for name in names if _is_picture(name)}
    masks, used, stems = dict[str, str](), {MULTIPLY}, set(pictures.values())
    for name, stem in list(pictures.items()):
        kind, of = _companion(stem, stems, has_caption=_first(stem, CAPTION_FILES, there) > 0)
        if kind is not None:
            del pictures[name]
            if kind is _MAPS:
                maps.append(prefix + name)
                used.add(name)
            elif stem.lower().endswith(_MASKS[0]) or of not in masks:
                masks[of] = name
    for name, stem in pictures.items():
        caption, values = (_first(stem, extensions, there) for extensions in (CAPTION_FILES, VALUE_FILES))
        found = {extension: there.get(stem + extension) for extension in (*CAPTION_FILES[1:], *VALUE_FILES[1:])}
        found[MASK] = masks.get(stem)
        used |= {name, *filter(None, found.values())}
        expected = {beside(name, extension): other for extension, other in found.items() if other is not None}
        yield PictureFile(
            name=prefix + name,
            factor=factor,
            caption=caption,
            values=values,
            mask=stem in masks,
            aliases={prefix + usual: prefix + other for usual, other in expected.items() if usual != other},
        )
    others += [prefix + name for name in names if name not in used]


def _is_picture(name: str) -> bool:
    stem, _, extension = name.rpartition(".")
    return bool(stem) and extension.lower() in EXTENSIONS


def _plain(name: str) -> str:
    """A name with composed accents and a lower-case extension: zips from a Mac decompose, cameras write capitals."""
    stem, dot, extension = unicodedata.normalize("NFC", name).rpartition(".")
    return f"{stem}{dot}{extension.lower()}"


def _companion(stem: str, stems: Collection[str], *, has_caption: bool) -> tuple[tuple[str, ...] | None, str]:
    """`_MASKS` or `_MAPS` and the stem of its picture, where a picture is not one of its own; else None."""
    lower = stem.lower()
    for kind in (_MASKS, _MAPS):
        if not lower.endswith(kind):
            continue
        ending = next(ending for ending in kind if lower.endswith(ending))
        of = stem[: len(stem) - len(ending)]
        if ending == _MASKS[0] or (of in stems and not has_caption):
            return kind, of
    return None, ""


def _first(stem: str, extensions: tuple[str, ...], there: Collection[str]) -> int:
    return next((i for i, extension in enumerate(extensions) if extension and stem + extension in there), 0)


def _read_factor(path: Path) -> float:
    remedy = "write one number, 0 or more, such as 2 or 0.5"
    with parsing(str(path), "is no factor", remedy), open_regular(path, limit=100) as file:
        factor = float(file.read())
        if not 0 <= factor <= _MOST_REPEATS:
            raise ValueError(f"{factor:g} is not between 0 and {_MOST_REPEATS}")
        return factor


def _is_utf8(name: str) -> bool:
    return name.encode(errors="replace").decode() == name
