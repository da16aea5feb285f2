"""Pictures of classes, captioned by the prompts of their class: in tars, or in a folder for each class."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.data.folder import PictureFile, PictureFolder
from cascade_train.data.index.rows import Index, combine, text_checksum
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.data.webdataset import WebDataset
from cascade_train.errors import ConfigError
from cascade_train.files.untrusted import MAX_BYTES, open_regular, parsing, read_json
from cascade_train.options import File

CHECKED = 50  # samples of tars whose class is looked up on opening
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """The prompts of each class."""

    given: Mapping[str, Any] | Sequence[Any] | None
    """A prompt or a list of them, by a class's name or in the order of numbers; None = the name, spaces for `_`."""

    @classmethod
    def load(cls, path: str | None) -> Prompts:
        """Read a json file, None = no file; a ConfigError where it is missing, or of another form."""
        if path is None:
            return cls(None)
        origin, remedy = f"data.idx_to_prompt={path}", f"paths start at {Path.cwd()}"
        file = Path(path).expanduser()
        with parsing(origin, "cannot be read as json", remedy), open_regular(file, limit=MAX_BYTES) as opened:
            content = read_json(opened.read())
        if isinstance(content, dict):  # folders may have their accents in another form
            content = {unicodedata.normalize("NFC", name): prompts for name, prompts in content.items()}
        entries = list(content.values()) if isinstance(content, dict) else content
        lists = entries if isinstance(entries, list) else [None]
        texts = [[entry] if isinstance(entry, str) else entry for entry in lists]
        if not all(isinstance(each, list) and each and all(isinstance(text, str) for text in each) for each in texts):
            form = "map each class to a prompt or a list of prompts, or list them in the order of the classes"
            raise ConfigError(f"data.idx_to_prompt={path} must {form}")
        return cls(content)

    def of(self, name: str, number: int | None = None) -> list[str]:
        """Prompts of a class, none if it is unknown; in a list, those of its number, else of its name."""
        if self.given is None:
            return [name.replace("_", " ")]
        if isinstance(self.given, Mapping):
            prompts = self.given.get(unicodedata.normalize("NFC", name), [])
        else:
            place = int(name) if number is None and name.isdecimal() else number
            prompts = self.given[place] if place is not None and place < len(self.given) else []
        return [prompts] if isinstance(prompts, str) else list(prompts)

    def add_to(self, index: Index) -> Index:
        """An index whose content changes with the prompts, too."""
        return replace(index, content=combine(index.content, np.full(len(index), text_checksum(self.given))))


@dataclass(kw_only=True)
class ClassTars(WebDataset):
    """KEY.jpg with KEY.cls, a class's name or number; values `class` and `prompts`; caption is the first prompt."""

    idx_to_prompt: File[str | None]

    caption = "cls"
    needed = "caption"  # the class, whatever of it makes the caption

    def open(self) -> Index:
        """See `Source.open`; a tar that cannot be indexed or a class without a prompt raises a `ConfigError`."""
        self._prompts = Prompts.load(self.idx_to_prompt)
        index = self._prompts.add_to(super().open())
        for row in np.unique(np.linspace(0, len(index) - 1, CHECKED).astype(np.int64)).tolist():
            try:
                name = super().read(row).caption
            except UnreadableSampleError:  # training counts it
                continue
            if not self._prompts.of(name):
                sample = f"{name} of {index.name(row)}"
                raise ConfigError(f"data.idx_to_prompt={self.idx_to_prompt} has no prompt for {sample}")
        return index

    def read(self, row: int) -> RawSample:
        """See `Source.read`: read one row, with the prompts of its class."""
        raw = super().read(row)
        prompts = self._prompts.of(raw.caption)
        if not prompts:
            raise UnreadableSampleError(f"its class {raw.caption!r:.40} has no prompt in {self.idx_to_prompt}")
        return replace(raw, caption=prompts[0], values={**raw.values, "class": raw.caption, "prompts": prompts})


@dataclass(kw_only=True)
class ClassFolders(PictureFolder):
    """A folder of pictures for each class, below one folder; values and captions as in `ClassTars`."""

    idx_to_prompt: File[str | None]

    def usable(self, pictures: list[PictureFile], others: list[str]) -> list[PictureFile]:
        """See `PictureFolder.usable`."""
        usable = [file for file in pictures if "/" in file.name]
        if not usable:
            raise ConfigError(f"data.path={self.path} has no folders of classes: write CLASS/NAME.jpg below it")
        if len(usable) < len(pictures):
            count = len(pictures) - len(usable)
            _log.warning("%s: left out %d pictures that lie in no class's folder", self.path, count)
        self._given = prompts = Prompts.load(self.idx_to_prompt)
        classes = sorted({file.name.partition("/")[0] for file in usable})
        self._prompts = {name: prompts.of(name, number) for number, name in enumerate(classes)}
        if without := [name for name, texts in self._prompts.items() if not texts]:
            names = f"{len(without)} of {len(classes)} classes: {', '.join(without[:5])}"
            raise ConfigError(f"data.idx_to_prompt={self.idx_to_prompt} has no prompt for {names}")
        return usable

    def _build_index(self) -> Index:
        index = super()._build_index()  # loads the prompts
        return self._given.add_to(index)

    def caption(self, row: int) -> tuple[str, str]:
        """See `PictureFolder.caption`."""
        return self._prompts[self._class_of(row)][0], "the prompts of its class"

    def _class_of(self, row: int) -> str:
        return self._index.keys[row].decode().partition("/")[0]

    def read(self, row: int) -> RawSample:
        """See `Source.read`: read one picture, with the prompts of its class."""
        raw, name = super().read(row), self._class_of(row)
        return replace(raw, values={**raw.values, "class": name, "prompts": self._prompts[name]})
