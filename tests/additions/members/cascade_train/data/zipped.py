"""Pictures in a zip file, each with its caption in a text file of the same name."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from cascade_train.data.decoding.decode import upright_size
from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.data.sample import RawSample
from cascade_train.data.source import Source
from cascade_train.errors import ConfigError
from cascade_train.options import File


@dataclass(kw_only=True)
class Zipped(Source):
    """Pictures in a zip file.

    Attributes:
        path: the file.
    """

    path: File[str]

    def check(self) -> None:
        if not Path(self.path).is_file():
            raise ConfigError(f"data.path={self.path}: there is no such file")

    def open(self) -> Index:
        self.check()
        with zipfile.ZipFile(self.path) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith(".png"))
            table = np.zeros(len(names), dtype=ROW_FIELDS)
            for row, name in enumerate(names):
                table["width"][row], table["height"][row] = upright_size(archive.read(name))
        self._index = Index(shards=(self.path,), table=table, keys=np.array([name.encode() for name in names]))
        return self._index

    def read(self, row: int) -> RawSample:
        name = PurePosixPath(self._index.keys[row].decode())
        with zipfile.ZipFile(self.path) as archive:
            caption = archive.read(str(name.with_suffix(".txt"))).decode()
            return RawSample(image=archive.read(str(name)), caption=caption, key=self._index.name(row))
