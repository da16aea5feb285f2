"""Write the pictures of a folder as webdataset tars; the same pictures give the same bytes, without times and users."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from cascade_train.data.decoding.decode import decode, to_rgb
from cascade_train.data.folder import MULTIPLY, Folder, PictureFile
from cascade_train.data.order.plan import permutation
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.data.tar.members import IMAGE_EXTENSIONS, write_tar
from cascade_train.data.webdataset import WebDataset
from cascade_train.errors import ConfigError, RunError

UNFINISHED = ".packing-"  # with the name: a folder in the target, for the tars until they have been read back
_READ_IN_ORDER: dict[str, Any] = {
    "image_size": 1,
    "crop": "center",
    "shuffle_window_shards": 1,
    "num_workers": 0,
    "worker_start": "fork",
    "row_filters": None,
}
"""Options of sources that are read here row by row."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The result of packing."""

    tars: tuple[Path, ...]  # in their order
    samples: int
    left_out: tuple[tuple[str, str], ...]  # name and reason of the pictures that could not be read


def pack(
    folder: str,
    out: Path,
    *,
    name: str,
    caption_from: Literal["file_or_name", "file", "name"],
    samples_per_shard: int,
    seed: int | None,
    overwrite: bool = False,
) -> Packed:
    """Write the pictures of a folder as tars `NAME-000000.tar`, ..., and read them back.

    A key is the picture's path without its extension, dots as underscores, `-2` where that is taken; its json has the
    path and the values. Unreadable pictures are left out. Seed None orders by name. A ConfigError where such tars
    exist, a RunError where they read back differently.
    """
    source = _Once(path=folder, caption_from=caption_from, metadata=True, index_dir=None, **_READ_IN_ORDER)
    created = [path for path in (out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    there = {path.name for path in out.iterdir() if re.fullmatch(rf"{re.escape(name)}-\d+\.tar", path.name)}
    if there and not overwrite:
        raise ConfigError(f"out={out} holds {name}-*.tar: choose another folder or name, or replace by overwrite=true")
    unfinished = out / f"{UNFINISHED}{name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    tars, digests, left_out = list[Path](), dict[str, bytes](), list[tuple[str, str]]()
    samples = _read_samples(source, seed, digests, left_out)
    try:
        for first in samples:
            of_tar = itertools.chain([first], itertools.islice(samples, samples_per_shard - 1))
            tars.append(write_tar(unfinished / f"{name}-{len(tars):06d}.tar", of_tar))
        if not tars:
            raise ConfigError(f"folder={folder}: no picture can be read: {left_out[0][1]}")
        if left := sorted(there - {tar.name for tar in tars}):
            raise ConfigError(f"out={out}: {left[0]} would stay beside {len(tars)} new tars; remove it")
        check_tars(tars, digests)
        moved = tuple(tar.rename(out / tar.name) for tar in tars)
        return Packed(tars=moved, samples=len(digests), left_out=tuple(left_out))
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # the first that is not empty
            for path in created:
                path.rmdir()


class _Once(Folder):
    """Each picture once, whatever `multiply.txt` says; a factor of 0 leaves pictures out."""

    def usable(self, pictures: list[PictureFile], others: list[str]) -> list[PictureFile]:
        """See `Folder.usable`."""
        usable = super().usable(pictures, others)
        if repeated := sum(file.factor not in (0, 1) for file in usable):
            text = "%s: tars have no %s, so %d pictures come once: pack those of one number by themselves, and set %s"
            _log.warning(text, self.path, MULTIPLY, repeated, "data.repeats of data=mixture")
        return [replace(file, factor=float(file.factor > 0)) for file in usable]


def check_tars(tars: list[Path], digests: Mapping[str, bytes]) -> None:
    """Read tars as training does, and compare the digests of their samples, by key; a RunError where they differ."""
    urls = [f"file:{tar.absolute()}" for tar in tars]
    source = WebDataset(urls=urls, index_dir=str(tars[0].parent), **_READ_IN_ORDER)
    index = source.open()
    read_back = {key.decode(): _digest(source.read(row)) for row, key in enumerate(index.keys.tolist())}
    wrong = sorted(key for key in digests.keys() | read_back.keys() if digests.get(key) != read_back.get(key))
    if wrong:
        raise RunError(f"{len(wrong)} of {len(digests)} samples read back differently, such as {wrong[0]}: try again")


def _read_samples(
    source: Folder, seed: int | None, digests: dict[str, bytes], left_out: list[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Yield the samples of a folder; fill in their digests by key, and path and reason of pictures left out."""
    index = source.open()
    for row in range(len(index)) if seed is None else permutation(len(index), seed, 0, "pack").tolist():
        path = index.keys[row].decode()
        try:
            raw = source.read(row)
            assert isinstance(raw.image, bytes)
            decode(raw.image, (1 << 15, 1 << 15), max_pixels=source.max_pixels)  # whole, not at a fraction
            values = {"path": path, **source.values_of(row)}
            extension, image = _encode_for_tar(path, raw.image)
        except UnreadableSampleError as error:
            left_out.append((path, str(error)))
            continue
        folder, slash, name = path.rpartition("/")  # a key of a tar ends at the first dot of its file's name
        stem = f"{folder}{slash}{name.rpartition('.')[0].replace('.', '_')}"
        candidates = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        key = next(candidate for candidate in candidates if candidate not in digests)
        digests[key] = _digest(RawSample(image=image, caption=raw.caption, key=key, mask=raw.mask))
        text = json.dumps(values, ensure_ascii=False, default=str).encode()
        mask = {} if raw.mask is None else {"mask.png": raw.mask}
        yield {"__key__": key, extension: image, "txt": raw.caption.encode(), "json": text, **mask}


def _encode_for_tar(path: str, image: bytes) -> tuple[str, bytes]:
    """Extension and content of a picture in a tar: its own where a tar may hold it, else png."""
    extension = path.rpartition(".")[2].lower().replace("jfif", "jpg")
    if extension in IMAGE_EXTENSIONS:
        return extension, image
    file = io.BytesIO()
    to_rgb(Image.open(io.BytesIO(image))).save(file, format="png")
    return "png", file.getvalue()


def _digest(raw: RawSample) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in (raw.image, raw.caption.encode(), raw.mask or b""):
        assert isinstance(part, bytes)
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()
