"""Captioned pictures in a folder and the folders below it, as they lie on the disk."""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cascade_train.data.files.folder import (
    CAPTION_FILES,
    MASK,
    MULTIPLY,
    VALUE_FILES,
    PictureFile,
    beside,
    caption_of_name,
    find_pictures,
    read_caption,
    read_values,
)
from cascade_train.data.files.pictures import EXTENSIONS, load_facts, load_picture_sizes, refuse_unreadable
from cascade_train.data.index.repeats import repeat_counts, repeated_rows
from cascade_train.data.index.row_filter import parse_row_filters
from cascade_train.data.index.row_verdicts import judged, passing_rows
from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError, RunError
from cascade_train.options import File, Free, Order

FOLDER_FIELDS = [*ROW_FIELDS, ("bytes", "<i8"), ("caption", "u1"), ("values", "u1"), ("mask", "u1")]
_SHOWN = 5
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class PictureFolder(Source):
    """Pictures (jpg, jpeg, jfif, png, webp, bmp) in a folder and all below it, but not in hidden ones.

    Attributes:
        path: the folder.
        index_dir: folder for the cached index; None = beside the data, else the user's cache folder.
        row_filters: conditions on each sample's json or yaml: a list of [key, condition], or a mapping; None = all.
    """

    path: Order[File[str]]
    index_dir: Free[str | None]
    row_filters: Order[list[list[Any]] | dict[str, str] | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._filters = parse_row_filters(self.row_filters)
        self._root = Path(self.path).expanduser()
        self._cache_dir = None if self.index_dir is None else Path(self.index_dir)

    @abc.abstractmethod
    def usable(self, found: list[PictureFile]) -> list[PictureFile]:
        """Return the pictures that have a caption, and say which have none; `found` holds at least one.

        Raises:
            ConfigError: none has.
        """

    @abc.abstractmethod
    def caption(self, name: str, entry: np.void) -> str:
        """Return the caption of a picture by its name and its row of the index.

        Raises:
            UnreadableSampleError: it is no text.
        """

    def check(self) -> None:
        """See `Source.check`: the folder, and a picture in it."""
        if next(find_pictures(self._root), None) is None:
            raise ConfigError(self._empty_text())

    def open(self) -> Index:
        """Find the pictures in the order of their names, and read the headers of those that changed.

        Raises:
            ConfigError: there is no such folder, or no usable picture in it; a `multiply.txt` is no number; no sample
                meets `row_filters`.
            RunError: a file cannot be read, or too many pictures have no readable header.
        """
        try:
            found = self._found()
            index = self._indexed(found)
        except OSError as error:
            raise RunError(f"data.path={self.path} cannot be read: {error}") from error
        refuse_unreadable(index, f"data.path={self.path}", self.max_unreadable_share)
        self._index = index
        return index

    def _found(self) -> list[PictureFile]:
        """Return the pictures that can be used."""
        found = list(find_pictures(self._root))
        if not found:
            raise ConfigError(self._empty_text())
        return self.usable(found)

    def _empty_text(self) -> str:
        has_tars = next(self._root.glob("*.tar"), None) is not None
        tars = "; its tar files are read by data=webdataset and named by data.urls" if has_tars else ""
        return (
            f"data.path={self.path} holds no picture (.{', .'.join(EXTENSIONS)}), nor do the folders below it;"
            f" hidden files do not count{tars}"
        )

    def _indexed(self, found: list[PictureFile]) -> Index:
        """Return the index of these pictures, repeated, and of those that meet the filters."""
        sizes = load_picture_sizes(self._root, self._root, [file.name for file in found], self._cache_dir)
        table = np.zeros(len(found), dtype=FOLDER_FIELDS)
        table["width"], table["height"], table["bytes"] = sizes.values[:, 0], sizes.values[:, 1], sizes.size
        for field in ("caption", "values", "mask"):
            table[field] = [getattr(file, field) for file in found]
        keys = np.array([file.name.encode() for file in found])
        counts = _repeat_counts(found, keys)
        if not counts.any():
            raise ConfigError(f"data.path={self.path}: {MULTIPLY} leaves no picture; write numbers above 0")
        if len(self._filters):
            counts = np.where(passing_rows(self._filters, self._verdicts(found)), counts, 0)
        rows = repeated_rows(counts)
        name = self._root.resolve().name
        return Index(shards=(name,), table=table[rows], keys=keys[rows], filters=self._filters.identity)

    def _verdicts(self, found: list[PictureFile]) -> np.ndarray:
        """Return what the filters say of each picture's values, (N, 1 + filters)."""

        def judge(path: Path) -> list[int]:
            return judged(self._filters, read_values(path, self.limits))

        verdicts = np.zeros((len(found), 1 + len(self._filters)), dtype=np.int32)
        rows = [row for row, file in enumerate(found) if file.values]
        names = [beside(found[row].name, VALUE_FILES[found[row].values]) for row in rows]
        kind, columns = f"verdicts-{self._filters.identity}-{self.max_text_kib}", verdicts.shape[1]
        facts = load_facts(self._root, self._root, names, judge, columns=columns, kind=kind, cache_dir=self._cache_dir)
        verdicts[rows] = facts.values
        return verdicts

    def read(self, row: int) -> RawSample:
        """Read a picture and what lies beside it."""
        name, entry = self._index.keys[row].decode(), self._index.table[row]
        return RawSample(
            image=self.limits.read(self._root / name, "image"),
            caption=self.caption(name, entry),
            key=self._index.name(row),
            mask=self.limits.read(self._root / beside(name, MASK), "mask") if entry["mask"] else None,
            values=self.values_of(row) if self.captions.needs_values else {},
        )

    def values_of(self, row: int) -> Mapping[str, Any]:
        """Return what the json or yaml beside a picture says, nothing where there is none.

        Raises:
            UnreadableSampleError: it is damaged.
        """
        name, extension = self._index.keys[row].decode(), VALUE_FILES[self._index.table["values"][row]]
        values = read_values(self._root / beside(name, extension), self.limits) if extension else {}
        if values is None:
            raise UnreadableSampleError(
                f"its {extension[1:]} is damaged: it is no mapping that can be read, or too large"
            )
        return values


@dataclass(kw_only=True)
class Folder(PictureFolder):
    """Pictures with their captions beside them, in `name.txt` or `name.caption`, or in their names.

    Of `a cat_(2).jpg`, the caption is the part before the first underscore. `name.json` or `name.yaml` may tell more,
    `name.mask.png` where the loss counts. A file `multiply.txt` with a number says how often the pictures of its own
    folder come in an epoch; fractions take a part of them once more, the same ones in every epoch.

    Attributes:
        caption_from: file = a file beside the picture, without one it is left out; name = the picture's name;
            file_or_name = its name where there is no file.
    """

    caption_from: Literal["file_or_name", "file", "name"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.caption_from not in ("file_or_name", "file", "name"):
            raise ValueError(f"data.caption_from={self.caption_from} is unknown: choose file_or_name, file or name")

    def usable(self, found: list[PictureFile]) -> list[PictureFile]:
        """See `PictureFolder.usable`."""
        named = [file for file in found if self.caption_from == "name" or not file.caption]
        if not self.captions.needs_text:
            missing, named = [file for file in found if not file.values], []
        elif self.caption_from == "file":
            missing, named = named, []
        else:
            missing = [file for file in named if not caption_of_name(file.name)]
        left_out = {file.name for file in missing}
        usable = [file for file in found if file.name not in left_out]
        if not usable:
            raise ConfigError(
                f"data.path={self.path}: none of {len(found)} pictures has a caption beside it"
                f" ({', '.join(CAPTION_FILES[1:] if self.captions.needs_text else VALUE_FILES[1:])}); write them, or"
                " take names by data.caption_from=file_or_name"
            )
        if missing:
            _log.warning("%s: left out %d pictures without a caption: %s", self.path, len(missing), _names(missing))
        if named and self.caption_from != "name":
            _log.info(
                "%s: %d of %d pictures have no caption file (%s), so their names are their captions: %s",
                self.path, len(named) - len(missing), len(usable), ", ".join(CAPTION_FILES[1:]), _names(named),
            )  # fmt: skip
        return usable

    def caption(self, name: str, entry: np.void) -> str:
        """See `PictureFolder.caption`."""
        extension = "" if self.caption_from == "name" else CAPTION_FILES[entry["caption"]]
        return read_caption(self._root / beside(name, extension), self.limits) if extension else caption_of_name(name)


def _repeat_counts(found: list[PictureFile], keys: np.ndarray) -> np.ndarray:
    """Return how often each picture comes; those of one factor share its fraction."""
    factors = np.array([file.factor for file in found])
    counts = np.zeros(len(found), dtype=np.int64)
    for factor in np.unique(factors).tolist():
        alike = factors == factor
        counts[alike] = repeat_counts(keys[alike].tolist(), factor)
    return counts


def _names(files: list[PictureFile]) -> str:
    shown = ", ".join(file.name for file in files[:_SHOWN])
    return shown + (", ..." if len(files) > _SHOWN else "")
