"""A folder of pictures -> webdataset tars, read back before they count.

The same pictures give the same bytes: samples by name or by a seed, no times, no users.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cascade_train.data.decoding.decode import decode, to_rgb
from cascade_train.data.folder import PictureFolder
from cascade_train.data.order.plan import permutation
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.data.tar.members import IMAGE_EXTENSIONS, write_tar
from cascade_train.data.webdataset import WebDataset
from cascade_train.errors import ConfigError, RunError

UNFINISHED = ".packing-"
"""How the folder within the target begins that holds the tars until all of them have been read back."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The result of packing."""

    tars: tuple[Path, ...]  # in their order
    samples: int
    left_out: tuple[tuple[str, str], ...]  # name and reason of the pictures that could not be read


def pack(source: PictureFolder, out: Path, *, name: str, samples_per_shard: int, seed: int | None) -> Packed:
    """Write the pictures of a folder as tars `NAME-000000.tar`, ..., and read them back.

    A key is the picture's path without its extension, dots as underscores; `-2` follows where that is taken. Its
    json holds the path, and what a json or yaml beside the picture says. Repeats (`multiply.txt`) are left to training,
    pictures that cannot be read are left out. A seed of None orders samples by name. A ConfigError where tars of the
    name are there, a RunError where what was written reads back differently.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob(f"{name}-*.tar")):
        raise ConfigError(f"out={out} holds {name}-*.tar already: remove them, or choose another folder or name")
    writer = _Writer(source, seed)
    unfinished = out / f"{UNFINISHED}{name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        tars = list(writer.write(unfinished, name, samples_per_shard))
        if not tars:
            raise ConfigError(f"folder={source.path}: no picture can be read: {writer.left_out[0][1]}")
        check_tars(tars, writer.digests)
        moved = tuple(tar.rename(out / tar.name) for tar in tars)
        return Packed(tars=moved, samples=len(writer.digests), left_out=tuple(writer.left_out))
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_tars(tars: list[Path], digests: Mapping[str, bytes]) -> None:
    """Read tars as training does, and compare the digests of their samples, by key; a RunError where they differ."""
    source = WebDataset(
        image_size=1,
        crop="center",
        shuffle_window_shards=1,
        num_workers=0,
        worker_start="fork",
        urls=[f"file:{tar.absolute()}" for tar in tars],
        index_dir=str(tars[0].parent),
        row_filters=None,
    )
    index = source.open()
    found = {key.decode(): _digest(source.read(row)) for row, key in enumerate(index.keys.tolist())}
    wrong = sorted(key for key in digests.keys() | found.keys() if digests.get(key) != found.get(key))
    if wrong:
        raise RunError(f"{len(wrong)} of {len(digests)} samples read back differently, such as {wrong[0]}: try again")


class _Writer:
    """Writes samples; keeps a digest of each, and what it left out."""

    def __init__(self, source: PictureFolder, seed: int | None) -> None:
        self._source, self._index = source, source.open()
        _, first = np.unique(self._index.keys, return_index=True)  # multiply.txt repeats rows
        rows = np.sort(first)
        self._rows = rows if seed is None else rows[permutation(len(rows), seed, 0, "pack")]
        self.digests: dict[str, bytes] = {}
        self.left_out: list[tuple[str, str]] = []

    def write(self, folder: Path, name: str, samples_per_shard: int) -> Iterator[Path]:
        """Write all samples, and yield the tars."""
        samples = self._samples()
        for number, first in enumerate(samples):
            rest = itertools.islice(samples, samples_per_shard - 1)
            yield write_tar(folder / f"{name}-{number:06d}.tar", itertools.chain([first], rest))

    def _samples(self) -> Iterator[dict[str, Any]]:
        for row in self._rows.tolist():
            path = self._index.keys[row].decode()
            try:
                raw = self._source.read(row)
                assert isinstance(raw.image, bytes)
                decode(raw.image, (1 << 15, 1 << 15), max_pixels=self._source.max_pixels)  # whole, not at a fraction
                values = {"path": path, **self._source.values_of(row)}
                extension, image = _stored(path, raw.image)
            except UnreadableSampleError as error:
                self.left_out.append((path, str(error)))
                continue
            key = self._key(path)
            self.digests[key] = _digest(RawSample(image=image, caption=raw.caption, key=key, mask=raw.mask))
            text = json.dumps(values, ensure_ascii=False, default=str).encode()
            mask = {} if raw.mask is None else {"mask.png": raw.mask}
            yield {"__key__": key, extension: image, "txt": raw.caption.encode(), "json": text, **mask}

    def _key(self, path: str) -> str:
        """Return a key of its own for a picture: a key of a tar ends at the first dot of its file's name."""
        folder, slash, name = path.rpartition("/")
        stem = f"{folder}{slash}{name.rpartition('.')[0].replace('.', '_')}"
        key, number = stem, 2
        while key in self.digests:
            key, number = f"{stem}-{number}", number + 1
        return key


def _stored(path: str, image: bytes) -> tuple[str, bytes]:
    """Return the extension and content of a picture in a tar: its own where a tar may hold it, else png."""
    extension = path.rpartition(".")[2].lower().replace("jfif", "jpg")
    if extension in IMAGE_EXTENSIONS:
        return extension, image
    file = io.BytesIO()
    to_rgb(Image.open(io.BytesIO(image))).save(file, format="png")
    return "png", file.getvalue()


def _digest(raw: RawSample) -> bytes:
    """Return a digest of picture, caption and mask."""
    state = hashlib.blake2b(digest_size=16)
    for part in (raw.image, raw.caption.encode(), raw.mask or b""):
        assert isinstance(part, bytes)
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()
