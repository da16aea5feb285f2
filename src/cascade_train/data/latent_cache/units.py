"""The tensors of a cache, in units of consecutive rows that are written whole and read by offset.

A unit is two tars of the webdataset layout, samples and captions, and a table of where everything in them lies. The
table is written last: a unit that has one is done. What the tensors mean is known to the stage alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from torch import Tensor

from cascade_train.data.latent_cache.manifest import Manifest
from cascade_train.data.tar.members import write_tar
from cascade_train.errors import RunError

SPAN = np.dtype([("start", "<i8"), ("bytes", "<i8"), ("crc32", "<u4")])
"""Where the payload of a file of a tar lies, and its checksum; 0 bytes = there is none."""

_PAYLOAD, _META = "safetensors", "json"
_KEY_DIGITS = 9


@dataclass(frozen=True, kw_only=True)
class CachedSample:
    """One sample as it is stored.

    Attributes:
        tensors: by name, without a batch dimension, on the host.
        meta: caption, key, weight and other values, as JSON holds them.
    """

    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class UnitTable:
    """Where everything of a unit lies.

    Attributes:
        samples: (rows of the unit, 2) of `SPAN`, tensors and JSON; 0 bytes where a row has no sample.
        captions: (M,) of `SPAN`.
        digests: (M,) bytes, `caption_digest` of each caption.
        tar_bytes: (2,) int64 sizes of the tars of samples and captions.
        manifest: digest of the manifest that the unit was made under.
    """

    samples: np.ndarray
    captions: np.ndarray
    digests: np.ndarray
    tar_bytes: np.ndarray
    manifest: str


def caption_digest(caption: str) -> str:
    """Return the name that a caption has in a cache: 32 hex digits of its text."""
    return hashlib.blake2b(caption.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def samples_tar(folder: Path, unit: int) -> Path:
    """Return where the samples of a unit lie."""
    return folder / f"samples-{unit:06d}.tar"


def captions_tar(folder: Path, unit: int) -> Path:
    """Return where the captions of a unit lie."""
    return folder / f"captions-{unit:06d}.tar"


def table_file(folder: Path, unit: int) -> Path:
    """Return where the table of a unit lies."""
    return folder / f"unit-{unit:06d}.npz"


def write_unit(
    folder: Path,
    unit: int,
    manifest: Manifest,
    *,
    samples: Mapping[int, CachedSample],
    captions: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Write a unit beside its place and move it there, its table last; the same content gives the same tars.

    Args:
        folder: of the cache.
        unit: its number.
        manifest: of the cache.
        samples: by row; a row that is not there has no sample.
        captions: tensors by caption.
    """
    work = Path(tempfile.mkdtemp(dir=folder, prefix=f".unit-{unit:06d}-"))
    rows, named = manifest.rows_of(unit), {caption_digest(caption): caption for caption in captions}
    try:
        tars = [
            write_tar(samples_tar(work, unit), _sample_parts(samples)),
            write_tar(captions_tar(work, unit), _caption_parts(named, captions)),
        ]
        of_samples, of_captions = (_spans(tar) for tar in tars)
        names = [(f"{_row_key(row)}.{_PAYLOAD}", f"{_row_key(row)}.{_META}") for row in rows]
        np.savez(
            table_file(work, unit),
            samples=np.array([[of_samples.get(name, (0, 0, 0)) for name in pair] for pair in names], dtype=SPAN),
            captions=np.array([of_captions[f"{name}.{_PAYLOAD}"] for name in named], dtype=SPAN),
            digests=np.array([name.encode() for name in named], dtype="S32"),
            tar_bytes=np.array([tar.stat().st_size for tar in tars]),
            manifest=np.array(manifest.digest),
        )
        table_file(folder, unit).unlink(missing_ok=True)
        for path in [*tars, table_file(work, unit)]:
            path.rename(folder / path.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load_table(folder: Path, unit: int, manifest: Manifest) -> UnitTable | None:
    """Return the table of a unit; None where the unit is not done, was made under another manifest, or is damaged.

    Only the sizes of the tars are looked at; `is_whole` reads them.
    """
    try:
        with table_file(folder, unit).open("rb") as file, np.load(file, allow_pickle=False) as parts:
            table = UnitTable(
                **{name: parts[name] for name in parts if name != "manifest"}, manifest=str(parts["manifest"])
            )
        sizes = [path.stat().st_size for path in (samples_tar(folder, unit), captions_tar(folder, unit))]
    except Exception:  # numpy and zipfile answer damage in many ways
        return None
    whole = table.manifest == manifest.digest and sizes == table.tar_bytes.tolist()
    return table if whole and len(table.samples) == len(manifest.rows_of(unit)) else None


def is_whole(folder: Path, unit: int, manifest: Manifest) -> bool:
    """Return whether a unit is done and every byte of it is what was written. Reads all of it."""
    table = load_table(folder, unit, manifest)
    if table is None:
        return False
    reader = PayloadReader()
    places = [(samples_tar(folder, unit), table.samples.reshape(-1)), (captions_tar(folder, unit), table.captions)]
    try:
        for path, spans in places:
            for span in spans[spans["bytes"] > 0]:
                reader.read(path, span)
    except (OSError, RunError):
        return False
    return True


class PayloadReader:
    """Reads spans of files and compares their checksums. A process that gets a copy, by fork or pickle, may read on."""

    MOST_OPEN_FILES = 64

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __getstate__(self) -> dict[str, object]:
        return {"_descriptors": {}}

    def read(self, path: Path, span: np.void) -> bytes:
        """Return the bytes of a span.

        Raises:
            RunError: they are not those that were written.
            OSError: the file cannot be read.
        """
        content = os.pread(self._descriptor(path), int(span["bytes"]), int(span["start"]))
        if zlib.crc32(content) != span["crc32"]:
            raise RunError(
                f"{path} is damaged at byte {span['start']}: run cascade-train cache again with the same"
                " arguments, which makes what is damaged anew"
            )
        return content

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            if len(self._descriptors) >= self.MOST_OPEN_FILES:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]


def read_tensors(payload: bytes) -> dict[str, Tensor]:
    """Return the tensors of a payload by name, as they were stored."""
    return safetensors.torch.load(payload)


def _row_key(row: int) -> str:
    return f"{row:0{_KEY_DIGITS}d}"


def _sample_parts(samples: Mapping[int, CachedSample]) -> Iterable[Mapping[str, Any]]:
    for row, sample in sorted(samples.items()):
        meta = json.dumps(sample.meta, sort_keys=True, default=_plain).encode()
        yield {"__key__": _row_key(row), _PAYLOAD: _payload(sample.tensors), _META: meta}


def _plain(value: Any) -> Any:
    """Return a number or an array of numpy as JSON can hold it, anything else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def _payload(tensors: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in sorted(tensors.items())})


def _caption_parts(
    named: Mapping[str, str], captions: Mapping[str, Mapping[str, Tensor]]
) -> Iterable[Mapping[str, Any]]:
    for name, caption in named.items():
        text = caption.encode("utf-8", "surrogatepass")
        yield {"__key__": name, _PAYLOAD: _payload(captions[caption]), "txt": text}


def _spans(tar: Path) -> dict[str, tuple[int, int, int]]:
    """Return start, size and checksum of every file of a tar, by name."""
    spans = {}
    with tarfile.open(tar) as archive, tar.open("rb") as file:
        for member in archive:
            file.seek(member.offset_data)
            spans[member.name] = (member.offset_data, member.size, zlib.crc32(file.read(member.size)))
    return spans
