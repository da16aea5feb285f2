"""Samples from a cache of latents and embeddings, made by `cascade-train cache`. No picture is read or decoded.

Rows, keys and shards are those of the data that the cache was made of: order and random draws are the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from cascade_train.data.buckets import BucketTable, exact_table
from cascade_train.data.captions import Captions
from cascade_train.data.index.rows import Index, changed_rows, changed_samples
from cascade_train.data.index.selection import RowSelector, Selection
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.data.source import Source
from cascade_train.data.tar.members import write_tar
from cascade_train.data.tar.storage import LocalFiles
from cascade_train.errors import ConfigError, RunError
from cascade_train.files.durable import replacing, write_durably
from cascade_train.files.output import check_unused
from cascade_train.files.untrusted import load_mapping, open_regular, parsing
from cascade_train.options import File, Free, Order

FORMAT = 1
MANIFEST, INDEX = "manifest.json", "index.npz"
CONTENT = ", SHA-256 "
"""Stands between the name of a file of the configuration and the digest of its content."""
REMEDY = "remove the cache and make it again."

SPAN = np.dtype([("start", "<i8"), ("bytes", "<i8"), ("crc32", "<u4")])
"""Place and checksum of the payload of a file of a tar; 0 bytes = there is none."""

_PAYLOAD, _META = "safetensors", "json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CacheManifest:
    """The content of a cache and what it was made from, equal in every process that fills it."""

    format: int = FORMAT
    rows: int  # of the source's index
    unit_samples: int  # rows of one unit
    index: str  # digest of the index, whose sizes are those that the pictures are trained at, 0 = a row takes no part
    filters: str  # identity of the filters that chose the source's rows; empty = none
    sizes: list[list[int]]  # height and width in pixels of each shape that the source trains at, in its order
    tensors: Mapping[str, str]  # of a sample, by name: dtype, and shape for the square of the run's image size
    captions: Mapping[str, str]  # of a caption, by name: dtype and shape; empty = the cache holds no captions
    identity: Mapping[str, Any]  # everything that changes a value, by its configuration key
    made_with: Mapping[str, str]  # versions of the libraries that made the tensors

    @property
    def units(self) -> int:
        """How many units the rows make."""
        return -(-self.rows // self.unit_samples)

    @property
    def digest(self) -> str:
        """16 hex digits that change with anything but the libraries' versions."""
        fields = dataclasses.asdict(self) | {"made_with": None}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def rows_of(self, unit: int) -> range:
        """Rows of a unit."""
        return range(unit * self.unit_samples, min(self.rows, (unit + 1) * self.unit_samples))


def write_manifest(
    folder: Path, manifest: CacheManifest, index: Index, *, on_change: str = "refuse"
) -> tuple[CacheManifest, set[int]]:
    """Write or read the manifest, and return the units whose samples changed; another cache is a ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).is_file():
            other = read_manifest(folder)
            difference, then = first_difference(manifest, other), made_of(folder, other, index)
            if difference is not None:
                if manifest.index != other.index:
                    difference = changed_samples(index, then) or difference
                raise ConfigError(f"out={folder} holds another cache: {difference}. Take another folder, or remove it.")
            remedy = "put it back, or make the units of changed samples again"
            refuse_changed(f"out={folder}", index, then, on_change, remedy)
            return other, set((changed_rows(index, then) // manifest.unit_samples).tolist())
        check_unused(folder, INDEX, MANIFEST)
        with replacing(folder / INDEX, racing=True) as partial:
            arrays: dict[str, Any] = {"table": index.table, "keys": index.keys, "shards": np.array(index.shards)}
            np.savez(partial, **arrays | ({} if index.split_by is None else {"split_by": index.split_by}))
        text = json.dumps(dataclasses.asdict(manifest), indent=1, sort_keys=True)
        write_durably(folder / MANIFEST, text, racing=True)
    except OSError as error:
        raise ConfigError(f"out={folder} cannot be written ({error}). Choose another folder.") from error
    return manifest, set()


def refuse_changed(where: str, index: Index, then: Index, on_change: str, remedy: str) -> None:
    """Raise a ConfigError where samples changed since a cache was made, unless on_change is "restart"."""
    if changed := changed_samples(index, then):
        text = f"{where} was made of data that changed since: {changed}"
        if on_change == "refuse":
            raise ConfigError(f"{text}. Remedy: {remedy} by data.on_change=restart")
        _log.warning("%s.", text)


def first_difference(manifest: CacheManifest, other: CacheManifest) -> str | None:
    """Where two manifests differ, the libraries' versions aside; None = nowhere."""
    for name in ("format", "unit_samples", "index", "filters", "sizes", "rows", "tensors", "captions"):
        if getattr(manifest, name) != getattr(other, name):
            return f"{name} is {getattr(manifest, name)} here and {getattr(other, name)} there"
    for key in sorted(manifest.identity.keys() | other.identity.keys()):
        option, theirs = manifest.identity.get(key), other.identity.get(key)
        if not same_option(option, theirs):
            return f"{key} is {option} here and {theirs} there"
    return None


def same_option(option: Any, other: Any) -> bool:
    """Whether options are equal: files by their content, by name where one of them is on another machine."""
    if not (isinstance(option, str) and isinstance(other, str) and CONTENT in option and CONTENT in other):
        return bool(option == other)
    (name, _, digest), (other_name, _, other_digest) = option.rpartition(CONTENT), other.rpartition(CONTENT)
    return name == other_name if "unknown" in (digest, other_digest) else digest == other_digest


def read_manifest(folder: Path) -> CacheManifest:
    """Manifest; a ConfigError where it is missing, damaged, or of another format."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(f"data.path={folder}: no cache found, there is no {MANIFEST}; run cascade-train cache")
    fields = load_mapping(path)
    if (version := fields.get("format")) != FORMAT:
        raise ConfigError(f"{path} has format {version}, this version reads {FORMAT}. Make the cache again.")
    with parsing(f"{path}", "is damaged", REMEDY):
        return CacheManifest(**fields)


def read_index(folder: Path, manifest: CacheManifest) -> Index:
    """Index of a cache; a ConfigError where it is damaged."""
    path = folder / INDEX
    with parsing(f"{path}", "is damaged", REMEDY):
        parts = _arrays(path)
        shards = tuple(parts["shards"].tolist())
        table, keys, split_by = parts["table"], parts["keys"], parts.get("split_by")
        index = Index(shards=shards, table=table, keys=keys, filters=manifest.filters, split_by=split_by)
    if index.digest != manifest.index:
        raise ConfigError(f"{path} is not the index of this cache; {REMEDY}")
    return index


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with open_regular(path) as file, np.load(file, allow_pickle=False) as parts:
        return dict(parts)


def made_of(folder: Path, manifest: CacheManifest, index: Index) -> Index:
    """Index of a cache with the content of its units, else the present content."""
    then = read_index(folder, manifest)
    content = np.resize(index.content, len(then))
    for unit in range(manifest.units):
        if table := load_table(folder, unit, manifest):
            content[manifest.rows_of(unit)] = table.content
    return replace(then, content=content)


@dataclass(frozen=True, kw_only=True)
class CachedSample:
    """One sample as it is stored: tensors without a batch dimension on the host; caption, key, weight, values."""

    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]

    def files(self) -> dict[str, bytes]:
        """Its files in a tar, by extension."""
        return {_PAYLOAD: _payload(self.tensors), _META: json.dumps(self.meta, sort_keys=True, default=_plain).encode()}


@dataclass(frozen=True, kw_only=True)
class UnitTable:
    """The places of a unit's samples and captions in its tars."""

    samples: np.ndarray  # (rows of the unit, 2) of `SPAN`, tensors and JSON; 0 bytes where a row has no sample
    captions: np.ndarray  # (M,) of `SPAN`
    digests: np.ndarray  # (M,) bytes, `caption_digest` of each caption
    tar_bytes: np.ndarray  # (2,) int64 sizes of the tars of samples and captions
    manifest: str  # digest of the manifest that the unit was made under
    content: np.ndarray  # of its rows, see `Index.content`


def caption_digest(caption: str) -> str:
    """Name of a caption in a cache: 32 hex digits of its text."""
    return hashlib.blake2b(_encoded(caption), digest_size=16).hexdigest()


def _encoded(caption: str) -> bytes:
    return caption.encode("utf-8", "surrogatepass")


def unit_file(folder: Path, kind: str, unit: int) -> Path:
    """A file of a unit: the tar of `samples` or `captions`, or the table, `unit`."""
    return folder / f"{kind}-{unit:06d}.{'npz' if kind == 'unit' else 'tar'}"


def write_unit(
    folder: Path,
    unit: int,
    manifest: CacheManifest,
    *,
    samples: Mapping[int, CachedSample],
    captions: Mapping[str, Mapping[str, Tensor]],
    content: np.ndarray,
) -> None:
    """Write a unit, its table last; the same content gives the same tars. Samples by row, captions by text."""
    named = {caption_digest(caption): caption for caption in captions}
    places = [unit_file(folder, kind, unit) for kind in ("unit", "captions", "samples")]
    with ExitStack() as stack:  # what was entered last is moved first
        table, *tars = [stack.enter_context(replacing(path, racing=True, durable=False)) for path in places]
        texts = ((name, text, _payload(captions[text])) for name, text in named.items())
        write_tar(
            tars[0],
            ({"__key__": name, _PAYLOAD: payload, "txt": _encoded(text)} for name, text, payload in texts),
        )
        write_tar(tars[1], ({"__key__": f"{row:09d}", **samples[row].files()} for row in sorted(samples)))
        of_captions, of_samples = (_spans(tar) for tar in tars)
        names = [(f"{row:09d}.{_PAYLOAD}", f"{row:09d}.{_META}") for row in manifest.rows_of(unit)]
        np.savez(
            table,
            samples=np.array([[of_samples.get(name, (0, 0, 0)) for name in pair] for pair in names], dtype=SPAN),
            captions=np.array([of_captions[f"{name}.{_PAYLOAD}"] for name in named], dtype=SPAN),
            digests=np.array([name.encode() for name in named], dtype="S32"),
            tar_bytes=np.array([tar.stat().st_size for tar in reversed(tars)]),
            manifest=np.array(manifest.digest),
            content=content,
        )
        places[0].unlink(missing_ok=True)


def load_table(folder: Path, unit: int, manifest: CacheManifest) -> UnitTable | None:
    """Table of a unit whose tars have the right size; None where it is missing, damaged, or of another manifest."""
    paths = [unit_file(folder, kind, unit) for kind in ("samples", "captions")]
    try:
        parts = _arrays(unit_file(folder, "unit", unit))
        table = UnitTable(manifest=str(parts.pop("manifest")), **parts)
        sizes = [path.stat().st_size for path in paths]
    except Exception:  # numpy and zipfile answer damage in many ways
        return None
    whole = table.manifest == manifest.digest and sizes == table.tar_bytes.tolist()
    return table if whole and len(table.samples) == len(manifest.rows_of(unit)) else None


def is_whole(folder: Path, unit: int, manifest: CacheManifest) -> bool:
    """Whether a unit is done and every byte of it matches its checksum. Reads all of it."""
    table = load_table(folder, unit, manifest)
    if table is None:
        return False
    files, places = LocalFiles(), {"samples": table.samples.reshape(-1), "captions": table.captions}
    with suppress(OSError, RunError):
        for kind, spans in places.items():
            for span in spans[spans["bytes"] > 0]:
                read_span(files, unit_file(folder, kind, unit), span)
        return True
    return False


def read_span(files: LocalFiles, path: Path, span: np.void) -> bytes:
    """Bytes of a span of a file; a RunError where their checksum is wrong."""
    content = os.pread(files.descriptor(str(path)), int(span["bytes"]), int(span["start"]))
    if zlib.crc32(content) != span["crc32"]:
        raise RunError(f"{path} is damaged at byte {span['start']}: run cascade-train cache again, which repairs it")
    return content


def _plain(value: Any) -> Any:
    """A number or an array of numpy as JSON can hold it, anything else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def _payload(tensors: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in sorted(tensors.items())})


def _spans(tar: Path) -> dict[str, tuple[int, int, int]]:
    spans = {}
    with tarfile.open(tar) as archive, tar.open("rb") as file:
        for member in archive:
            file.seek(member.offset_data)
            spans[member.name] = (member.offset_data, member.size, zlib.crc32(file.read(member.size)))
    return spans


@dataclass(kw_only=True)
class Cached(Source):
    """The samples of a cache. Options of preprocessing follow the cache; a different value is refused."""

    is_cache: ClassVar[bool] = True
    path: Order[File[str]]
    source: Free[Source | None] = None
    crop: Literal["center", "random", "saliency"] = "center"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._folder = Path(self.path).expanduser()
        self._files = LocalFiles()
        self.manifest: CacheManifest  # what the opened cache holds

    def open(self) -> Index:
        """See `Source.open`: read the manifest, the index and the tables of all units."""
        self.manifest = read_manifest(self._folder)
        self._index = read_index(self._folder, self.manifest)
        tables = []
        for unit in range(self.manifest.units):
            table = load_table(self._folder, unit, self.manifest)
            if table is None:
                raise ConfigError(
                    f"data.path={self.path}: unit {unit} of {self.manifest.units} is missing or damaged. Run"
                    " cascade-train cache again with the same arguments, which makes what is missing."
                )
            tables.append(table)
        self._samples = np.concatenate([table.samples for table in tables])
        self._captions = np.concatenate([table.captions for table in tables])
        units = np.repeat(np.arange(len(tables)), [len(table.captions) for table in tables])
        self._digests, first = np.unique(np.concatenate([table.digests for table in tables]), return_index=True)
        self._captions, self._unit_of_caption = self._captions[first], units[first]
        self._index = replace(self._index, content=np.concatenate([table.content for table in tables]))
        if self.source is not None:
            remedy = "run cascade-train cache again, or train on what the cache holds,"
            refuse_changed(f"data.path={self.path}", self.source.open(), self._index, self.on_change, remedy)
        return self._index

    def bucket_table(self, index: Index) -> BucketTable:
        """Sizes at which the cache was made."""
        exact = exact_table(np.array(self.manifest.sizes, dtype=np.int64))
        of_one_area = len(np.unique(exact.ratio_E)) == len(exact.ratio_E)
        return replace(exact, distance="log") if of_one_area else exact  # of runs so far

    def selectors(self) -> list[RowSelector]:
        """Selectors without the rows that the cache left out, and the quarantine's."""
        reason = "took no part when the cache was made"
        return [lambda index: Selection(kept=index.table["width"] > 0, reason=reason), *self.quarantine_selectors()]

    def read(self, row: int) -> RawSample:
        """See `Source.read`. A RunError where the cache is damaged."""
        spans = self._samples[row]
        if spans["bytes"].min() == 0:
            raise UnreadableSampleError("its picture was unreadable when the cache was made")
        path = unit_file(self._folder, "samples", row // self.manifest.unit_samples)
        tensors, meta = (read_span(self._files, path, span) for span in spans)
        arrays = {name: _array(tensor) for name, tensor in safetensors.torch.load(tensors).items()}
        known = {key: value for key, value in json.loads(meta).items() if key in ("caption", "weight", "values")}
        return RawSample(image=None, key=self._index.name(row), tensors=arrays, **known)

    def captions_of(self, row: int) -> Captions:
        """Return what makes a caption; those with cached embeddings stay as they are."""
        return Captions() if self.manifest.captions else self.captions

    def find_captions(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Cached tensors of captions, (B, ...) by name; a ConfigError if one is missing."""
        tensors = {caption: safetensors.torch.load(self._read_caption(caption)) for caption in dict.fromkeys(captions)}
        return {name: torch.stack([tensors[caption][name] for caption in captions]) for name in self.manifest.captions}

    def _read_caption(self, caption: str) -> bytes:
        digest = caption_digest(caption).encode()
        place = int(np.searchsorted(self._digests, digest))
        if place == len(self._digests) or self._digests[place] != digest:
            raise ConfigError(
                f"the caption {caption[:80]!r} is not in the cache at data.path={self.path}: make a cache with these"
                " sample.prompts and this sample.negative_prompt, or with captions=false"
            )
        path = unit_file(self._folder, "captions", int(self._unit_of_caption[place]))
        return read_span(self._files, path, self._captions[place])


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor for a batch; numpy has no bf16, which becomes fp32 without loss."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
