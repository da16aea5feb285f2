"""Small tars and pictures for the tests of data."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cascade_train.data.index.rows import ROW_FIELDS, Index
from cascade_train.data.tar.files import Tar
from cascade_train.data.tar.storage import LocalFiles
from cascade_train.data.webdataset import WebDataset


def picture(width: int = 40, height: int = 32, *, kind: str = "png", tint: int = 90) -> bytes:
    """Encode a gradient whose colours depend on `tint`."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([x, y, np.full_like(x, tint % 256)], axis=-1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()


def mask(width: int = 40, height: int = 32) -> bytes:
    """Encode a mask that is black."""
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, format="png")
    return file.getvalue()


def write(path: Path, files: Iterable[tuple[str, bytes]], mode: str = "w") -> Path:
    """Write a tar with these files, in this order."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def samples(keys: Iterable[int], *, damaged: Iterable[int] = ()) -> list[tuple[str, bytes]]:
    """Return picture and caption of each key; damaged ones have a good header and no end."""
    files = []
    for key in keys:
        image = picture(tint=key)
        image = image[: len(image) // 2] if key in set(damaged) else image
        files += [(f"{key:04d}.png", image), (f"{key:04d}.txt", f"picture {key}".encode())]
    return files


def found(path: Path) -> Tar:
    """Return a local tar as the index takes it."""
    store = LocalFiles()
    return Tar(item=store.stat(str(path)), store=store)


def index(keys: Iterable[str], shards: tuple[str, ...] = ("a.tar",), **columns: Any) -> Index:
    """Return an index of samples that lie nowhere; columns are those of its table, 0 by default."""
    names = np.array([key.encode() for key in keys])
    table = np.zeros(len(names), dtype=ROW_FIELDS)
    for name, values in columns.items():
        table[name] = values
    return Index(shards=shards, table=table, keys=names)


ORDER: dict[str, Any] = {
    "image_size": 16, "crop": "center", "shuffle_window_shards": 2, "num_workers": 0, "worker_start": "fork",
}  # fmt: skip
SMALL: dict[str, Any] = {**ORDER, "index_dir": None, "row_filters": None}
"""Options of any source, and of those of files."""


def webdataset(urls: Any, **options: Any) -> WebDataset:
    """Make a source with small defaults."""
    return WebDataset(urls=urls if isinstance(urls, list) else str(urls), **{**SMALL, **options})
