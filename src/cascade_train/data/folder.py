"""Captioned pictures in a folder and the folders below it: captions, values and masks lie beside the pictures."""

from __future__ import annotations

import abc
import hashlib
import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from cascade_train.data.index.cache import load_checksums, load_facts, load_picture_facts
from cascade_train.data.index.row_filter import read_metadata
from cascade_train.data.index.rows import (
    ROW_FIELDS,
    Index,
    combine,
    first_names,
    repeat_counts,
    repeat_rows,
    text_checksum,
)
from cascade_train.data.sample import FileLimits, RawSample, UnreadableSampleError, caption_text
from cascade_train.data.source import FileSource
from cascade_train.data.table import METADATA_FILES, caption_of, number_of, read_metadata_files
from cascade_train.errors import ConfigError
from cascade_train.files.run_folder import walk_data
from cascade_train.files.untrusted import open_regular, parsing, read_yaml
from cascade_train.options import File, Free, Order

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
    """Yield the pictures below a folder, sorted by code points; `others` gets all other visible files."""
    if not root.is_dir():
        other = f". Tars are read by: data=webdataset data.urls={root}" if root.suffix == ".tar" else ""
        other = f". Give the folder of the pictures: data.path={root.parent}" if "*" in root.name else other
        raise ConfigError(f"data.path={root} is not a folder; paths are relative to {Path.cwd()}{other}")
    strange, maps = list[str](), list[str]()
    for folder, names in walk_data(root):
        prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
        is_utf8 = {name: (prefix + name).encode(errors="replace").decode() == prefix + name for name in names}
        strange += [name for name in names if not is_utf8[name]]
        yield from _in_one_folder(folder, prefix, [name for name in names if is_utf8[name]], others, maps)
    if maps:
        text = "%s: %d control maps beside pictures are not read, since task.filter makes them (%s); a .txt trains one"
        _log.warning(text, root, len(maps), ", ".join(maps[:5]))
    if strange:
        _log.warning("%s: left out %d files whose names are not UTF-8: %s", root, len(strange), ascii(strange[:5]))


def caption_of_name(name: str) -> str:
    """Part of a file name before its first underscore, without the extension."""
    return Path(name).stem.partition("_")[0].strip()


def read_values(path: Path, limits: FileLimits) -> Mapping[str, Any] | None:
    """Values of a json or yaml file; None where it is no mapping that can be read, or too large."""
    try:
        content = limits.read(path, path.suffix[1:])
    except UnreadableSampleError:
        return None
    values = read_metadata(content)
    if values is None and path.suffix != ".json":
        with suppress(ValueError):
            values = read_yaml(content)
    return values if isinstance(values, Mapping) else None


def beside(name: str, extension: str) -> str:
    """Name of the file with another extension beside a picture."""
    return f"{name.rpartition('.')[0]}{extension}"


def counted(names: Sequence[str]) -> str:
    """How many files of each kind there are, and the first of each: `3 .gif (a.gif)`."""
    first: dict[str, str] = {}
    kinds = Counter(Path(name).suffix.lower() for name in names if first.setdefault(Path(name).suffix.lower(), name))
    return ", ".join(f"{count} {kind or 'without extension'} ({first[kind]})" for kind, count in kinds.most_common())


def _in_one_folder(
    folder: Path, prefix: str, names: list[str], others: list[str], maps: list[str]
) -> Iterator[PictureFile]:
    there = {_plain(name): name for name in names} | {name: name for name in names}
    factor = _read_factor(folder / MULTIPLY) if MULTIPLY in there else 1.0
    pictures = {name: _plain(name).rpartition(".")[0] for name in names if Path(name).suffix[1:].lower() in EXTENSIONS}
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
        companions = {extension: there.get(stem + extension) for extension in (*CAPTION_FILES[1:], *VALUE_FILES[1:])}
        companions[MASK] = masks.get(stem)
        used |= {name, *filter(None, companions.values())}
        expected = {beside(name, extension): other for extension, other in companions.items() if other is not None}
        yield PictureFile(
            name=prefix + name,
            factor=factor,
            caption=caption,
            values=values,
            mask=stem in masks,
            aliases={prefix + usual: prefix + other for usual, other in expected.items() if usual != other},
        )
    others += [prefix + name for name in names if name not in used]


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


FOLDER_FIELDS = [*ROW_FIELDS, ("bytes", "<i8"), ("caption", "u1"), ("values", "u1"), ("mask", "u1")]


@dataclass(kw_only=True)
class PictureFolder(FileSource):
    """Pictures (jpg, jpeg, jfif, png, webp, bmp) in a folder and all below it, but not in hidden ones."""

    path: Order[File[str]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._root = Path(self.path).expanduser()
        self._takes_captions = False  # whether captions come from files beside the pictures

    @abc.abstractmethod
    def usable(self, pictures: list[PictureFile], others: list[str]) -> list[PictureFile]:
        """Pictures that have a caption, at least one, else a ConfigError; removes from `others` what is read."""

    @abc.abstractmethod
    def caption(self, row: int) -> tuple[str, str]:
        """Caption of a row of the index, and its origin."""

    def check(self) -> None:
        """See `Source.check`: the folder, and a picture in it."""
        others: list[str] = []
        if next(find_pictures(self._root, others), None) is None:
            self._refuse_empty(others)

    def _refuse_empty(self, others: Sequence[str]) -> NoReturn:
        tars = "; its tar files are read by data=webdataset" if any(self._root.glob("*.tar")) else ""
        raise ConfigError(
            f"data.path={self.path} holds no picture (.{', .'.join(EXTENSIONS)}), nor do the folders below it;"
            f" hidden files do not count{tars}{f'; there are {counted(others)}' if others else ''}"
        )

    def _build_index(self) -> Index:
        others: list[str] = []
        if not (pictures := list(find_pictures(self._root, others))):
            self._refuse_empty(others)
        pictures = self.usable(pictures, others)
        if others:
            _log.warning("%s: passed over what belongs to no picture that is read: %s", self.path, counted(others))
        self._aliases = {usual: name for file in pictures for usual, name in file.aliases.items()}
        table = np.zeros(len(pictures), dtype=FOLDER_FIELDS)
        names = [file.name for file in pictures]
        file_bytes, facts = load_picture_facts(self._root, self._root, names, self._cache_dir)
        table["bytes"], table["width"], table["height"] = file_bytes, *facts[:, :2].T
        content = combine(facts[:, 2], *self._checksums_beside(pictures))
        for part in ("caption", "values", "mask"):
            table[part] = [getattr(file, part) for file in pictures]
        keys = np.array([name.encode() for name in names])
        counts = np.zeros(len(pictures), dtype=np.int64)
        factors = np.array([file.factor for file in pictures])
        for factor in np.unique(factors).tolist():  # pictures of one factor share its fraction
            counts[factors == factor] = repeat_counts(keys[factors == factor].tolist(), factor)
        if not counts.any():
            raise ConfigError(f"data.path={self.path}: {MULTIPLY} leaves no picture; write numbers above 0")
        if len(self._filters):
            counts = np.where(self._filters.kept(self._verdicts(pictures)), counts, 0)
        rows, described = repeat_rows(counts), sorted(file.name for file in pictures if file.row)
        self._metadata = [pictures[row].row for row in rows.tolist()]
        return Index(
            shards=(self._root.resolve().name,),
            table=table[rows],
            keys=keys[rows],
            filters=self._filters.identity,
            metadata=hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16] if described else "",
            content=content[rows],
        )

    def _checksums_beside(self, pictures: list[PictureFile]) -> np.ndarray:
        """Checksums of captions, values and masks that make samples, (3, N)."""
        takes_values, names = self.captions.needs_values, list[str]()
        for file in pictures:
            caption = CAPTION_FILES[file.caption] if self._takes_captions else ""
            parts = caption, VALUE_FILES[file.values] if takes_values else "", MASK if file.mask else ""
            names += [self._beside(file.name, extension) if extension else "" for extension in parts]
        parts_N3 = load_checksums(self._root, self._root, names, self._cache_dir).reshape(-1, 3)
        for parts_3, file in zip(parts_N3, pictures, strict=True):
            if file.row:
                parts_3[0] = text_checksum((file.row, int(parts_3[0])))
        return parts_N3.T

    def _verdicts(self, pictures: list[PictureFile]) -> np.ndarray:
        """Verdicts on each picture's values, (N, 1 + filters)."""

        def judge(path: Path) -> list[int]:
            return self._filters.judge(read_values(path, self.limits))

        columns, kind = 1 + len(self._filters), f"verdicts-{self._filters.identity}-{self.max_text_kib}"
        names = [self._beside(file.name, VALUE_FILES[file.values]) for file in pictures if file.values]
        folder, kept = self._root, self._cache_dir
        _, judged = load_facts(folder, folder, names, judge, columns=columns, kind=kind, cache_dir=kept)
        verdicts = np.zeros((len(pictures), columns), dtype=np.int64)
        verdicts[[bool(file.values) for file in pictures]] = judged
        for number, file in enumerate(pictures):
            if file.row:
                values = self._values(file.name, VALUE_FILES[file.values], file.row) or {}
                verdicts[number] = self._filters.judge({key: number_of(value) for key, value in values.items()})
        return verdicts

    def read(self, row: int) -> RawSample:
        """See `Source.read`: a picture and the files beside it."""
        name, entry = self._index.keys[row].decode(), self._index.table[row]
        caption, caption_from = self.caption(row)
        return RawSample(
            image=self.limits.read(self._root / name, "image"),
            caption=caption,
            caption_from=caption_from,
            key=self._index.name(row),
            mask=self.limits.read(self._root / self._beside(name, MASK), "mask") if entry["mask"] else None,
            values=self.values_of(row) if self.captions.needs_values else {},
        )

    def values_of(self, row: int) -> Mapping[str, Any]:
        """Values of the json or yaml beside a picture, none where there is no such file."""
        name, extension = self._index.keys[row].decode(), VALUE_FILES[self._index.table["values"][row]]
        values = self._values(name, extension, self._metadata[row])
        if values is None:
            raise UnreadableSampleError(f"its {extension[1:]} is damaged: no mapping that can be read, or too large")
        return values

    def _beside(self, name: str, extension: str) -> str:
        usual = beside(name, extension)
        return self._aliases.get(usual, usual)

    def _values(self, name: str, extension: str, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Merge a row of a metadata file and the file beside a picture; None where that cannot be read."""
        values = read_values(self._root / self._beside(name, extension), self.limits) if extension else {}
        return None if values is None else {**row, **values}


@dataclass(kw_only=True)
class Folder(PictureFolder):
    """Pictures with their captions beside them, in `name.txt` or `name.caption`, in a metadata file, or in their names.

    Of `a cat_(2).jpg`, the caption is the file name up to the first underscore. `name.json` or `name.yaml` may hold
    more, `name.mask.png` where the loss counts. A file `multiply.txt` with a number sets how often the pictures of its
    own folder come in an epoch; fractions take a part of them once more, the same ones in every epoch.
    """

    caption_from: Literal["file_or_name", "file", "name"]
    metadata: Free[bool] = False  # its effect is part of the index

    def __post_init__(self) -> None:
        super().__post_init__()
        self._takes_captions = self.caption_from != "name"

    def usable(self, pictures: list[PictureFile], others: list[str]) -> list[PictureFile]:
        """See `PictureFolder.usable`."""
        self._report_repeats(pictures)
        pictures, folders = self._with_rows(pictures, others)
        by_name = self.caption_from == "name"
        named = [file.name for file in pictures if by_name or not (file.caption or caption_of(file.row))]
        if not self.captions.needs_text:
            missing, named = [file.name for file in pictures if not file.values and not file.row], []
        elif self.caption_from == "file":
            missing, named = named, []
        else:
            covered = tuple(f"{folder}/" if folder else "" for folder in folders)  # whose pictures should have rows
            missing = [name for name in named if not caption_of_name(name) or name.startswith(covered)]
        left_out = set(missing)
        usable = [file for file in pictures if file.name not in left_out]
        if not usable:
            files = ", ".join(CAPTION_FILES[1:] if self.captions.needs_text else VALUE_FILES[1:])
            raise ConfigError(
                f"data.path={self.path}: none of {len(pictures)} pictures has a caption beside it ({files}) or in"
                f" {' or '.join(METADATA_FILES)}; write them, or take names by data.caption_from=file_or_name"
            )
        if missing:
            text = "%s: left out %d pictures without a caption: %s"
            _log.warning(text, self.path, len(missing), first_names(missing))
        if (count := len(named) - len(missing)) > 0 and not by_name:
            text = "%s: %d of %d pictures have no caption file (.txt, .caption), so their names are their captions: %s"
            _log.info(text, self.path, count, len(usable), first_names(named))
        return usable

    def _report_repeats(self, pictures: Sequence[PictureFile]) -> None:
        """Log folders below the root that are named as by kohya's scripts, `10_sks dog`, and have no `multiply.txt`."""
        folders = sorted({file.name.rpartition("/")[0] for file in pictures})
        kohyas = [folder for folder in folders if re.match(r"[1-9]\d{0,2}_\D", folder.rpartition("/")[2])]
        if lacking := [folder for folder in kohyas if not (self._root / folder / MULTIPLY).is_file()]:
            text = "%s: repeats in names of folders (%s) are not read: write the number into %s there, or 1"
            _log.warning(text, self.path, lacking[0], MULTIPLY)

    def _with_rows(self, pictures: list[PictureFile], others: list[str]) -> tuple[list[PictureFile], list[str]]:
        """Pictures with their rows of metadata files, and the folders of these files."""
        files = [name for name in others if name.rpartition("/")[2] in METADATA_FILES]
        if not self.metadata or not files or self.caption_from == "name":
            return pictures, []
        others[:] = [name for name in others if name not in files]
        rows, folders = read_metadata_files(self._root, files, [file.name for file in pictures])
        count = sum(not file.caption and bool(caption_of(rows.get(file.name, {}))) for file in pictures)
        text = "%s: captions of %d of %d pictures are those of %s"
        _log.info(text, self.path, count, len(pictures), first_names(files))
        uses_all = self.captions.needs_values or len(self._filters)
        return [
            replace(file, row=rows.get(file.name, {})) if uses_all or not file.caption else file for file in pictures
        ], folders

    def caption(self, row: int) -> tuple[str, str]:
        """See `PictureFolder.caption`."""
        name, place = self._index.keys[row].decode(), self._index.table["caption"][row]
        if place and self.caption_from != "name":
            path = self._root / self._beside(name, CAPTION_FILES[place])
            return caption_text(self.limits.read(path, "caption")), f"{CAPTION_FILES[place]} beside the picture"
        if text := caption_of(self._metadata[row]):
            return text, "a metadata file"
        return caption_of_name(name), "the picture's name"
