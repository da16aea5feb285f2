"""The index of one tar file, read from its headers, and its cache on disk.

Payloads are skipped, except for the beginning of each picture, whose header gives its size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cascade_train.data.decode import upright_size
from cascade_train.data.index import ROW_FIELDS
from cascade_train.data.index_cache import default_cache_dir, read_cache, write_cache
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.errors import ConfigError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
TAR_FIELDS = ROW_FIELDS + [
    (f"{part}_{what}", "<i8") for part in ("image", "caption", "json") for what in ("start", "bytes")
]
_FORMAT = 1
_HEADER_BYTES = 64 * 1024
_LONGEST_PADDING = 1024 * 1024  # tar fills up to a multiple of its record, mostly 10 KiB
# webdataset's rule: the key is the path up to the first dot of the file name, the rest is the extension.
_KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Dropped:
    """What a shard holds besides usable samples.

    Attributes:
        without_caption: keys with a picture but no caption.
        without_image: keys with neither jpg, jpeg, png nor webp.
        examples: the first keys of either kind, with their extensions.
    """

    without_caption: int = 0
    without_image: int = 0
    examples: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Say how many and which."""
        return (
            f"{self.without_caption} keys with a picture but no caption (.txt), {self.without_image} keys without a"
            f" picture (.{', .'.join(IMAGE_EXTENSIONS)}); found: {'; '.join(self.examples) or 'none'}"
        )


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The usable samples of one shard, in its order.

    Attributes:
        table: (N,) structured array with the fields of `TAR_FIELDS`; a missing json has 0 bytes at 0.
        keys: (N,) bytes.
        dropped: what is not usable.
    """

    table: np.ndarray
    keys: np.ndarray
    dropped: Dropped


@dataclass(frozen=True, kw_only=True)
class _Span:
    start: int
    size: int


def load_shard(path: Path, cache_dir: Path | None) -> ShardIndex:
    """Return the index of a tar, from the cache if it is there, else from the headers.

    Args:
        path: the tar.
        cache_dir: where the cache lies; None = `.cascade_train_index` beside the tar if that can be written, else
            the user's cache folder.

    Raises:
        ConfigError: the tar cannot be indexed or holds no usable sample.
    """
    cached = cache_file(path, cache_dir)
    shard = _read_cache(cached)
    if shard is None:
        shard = scan_shard(path)
        parts = {"table": shard.table, "keys": shard.keys, "dropped": np.array(json.dumps(asdict(shard.dropped)))}
        write_cache(cached, parts, required=cache_dir is not None)
    return shard


def cache_file(path: Path, cache_dir: Path | None) -> Path:
    """Return where what was read from a tar is kept; the name changes with the tar. See `load_shard`."""
    return (default_cache_dir(path) if cache_dir is None else cache_dir) / _cache_name(path)


def scan_shard(path: Path) -> ShardIndex:
    """Build the index of a tar from its headers.

    Raises:
        ConfigError: the tar is empty, compressed, damaged, not sorted by key, or holds no usable sample.
    """
    rows, keys, dropped = [], [], Dropped()
    with path.open("rb") as file:
        for key, spans in _samples(path):
            image = next((spans[extension] for extension in IMAGE_EXTENSIONS if extension in spans), None)
            if image is None or "txt" not in spans:
                _count_dropped(dropped, key, spans, image is None)
                continue
            width, height = _picture_size(file, image)
            absent = _Span(start=0, size=0)
            parts = (image, spans["txt"], spans.get("json", absent))
            rows.append((0, width, height, *(number for part in parts for number in (part.start, part.size))))
            keys.append(key.encode())
    if not rows:
        raise ConfigError(_nothing_usable_text(path, dropped))
    return ShardIndex(table=np.array(rows, dtype=TAR_FIELDS), keys=np.array(keys), dropped=dropped)


def _samples(path: Path) -> Iterator[tuple[str, dict[str, _Span]]]:
    """Group consecutive members by key."""
    seen: set[str] = set()
    current, spans = "", dict[str, _Span]()
    for key, extension, span in _members(path):
        if key != current and spans:
            yield current, spans
            spans = {}
        if (key != current and key in seen) or extension in spans:
            raise ConfigError(
                f"data.urls: {path}: the files of key {key} are not next to each other, or one is there twice; write"
                " the tar with tar --sort=name -cf dataset.tar dataset/"
            )
        seen.add(key)
        current, spans[extension] = key, span
    if spans:
        yield current, spans


def _members(path: Path) -> Iterator[tuple[str, str, _Span]]:
    """Yield key, extension and place of each regular file that has an extension."""
    _refuse_compressed(path)
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined] # tarfile keeps every header otherwise
                match = _KEY.match(member.name)
                if match is not None and member.isreg() and not member.issparse():
                    yield match[1], match[2].lower(), _Span(start=member.offset_data, size=member.size)
            _refuse_unended(path, tar.offset)
    except tarfile.TarError as error:
        raise ConfigError(f"data.urls: {path} is not a readable tar file ({error}); write or copy it again") from error


def _refuse_unended(path: Path, end: int) -> None:
    """Check that the tar ends where its members do: tarfile stops in silence where a header is cut short.

    Raises:
        ConfigError: there is no end mark, or something comes after it.
    """
    with path.open("rb") as file:
        file.seek(end)
        rest = file.read(_LONGEST_PADDING)
    if len(rest) < tarfile.BLOCKSIZE:
        raise ConfigError(f"data.urls: {path} is cut short: it has no end mark. Copy or write it again")
    if any(rest):
        raise ConfigError(
            f"data.urls: {path} goes on after its end mark at byte {end}, as when tars are joined by cat or the file is"
            " damaged: give the tars one by one, or write it again"
        )


def _refuse_compressed(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(5)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise ConfigError(
                f"data.urls: {path} is compressed ({name}), so that samples have no place to be read at; decompress it"
                " (pictures gain nothing from it)"
            )


def _picture_size(file: BinaryIO, image: _Span) -> tuple[int, int]:
    """Return (width, height), or (0, 0) if the header cannot be read."""
    for limit in (_HEADER_BYTES, image.size):  # large metadata may come before the size; webp wants the whole file
        file.seek(image.start)
        try:
            return upright_size(file.read(min(limit, image.size)))
        except UnreadableSampleError:
            continue
    return 0, 0


def _count_dropped(dropped: Dropped, key: str, spans: dict[str, _Span], no_image: bool) -> None:
    dropped.without_image += no_image
    dropped.without_caption += not no_image
    if len(dropped.examples) < 5:
        dropped.examples.append(f"{key} ({', '.join(sorted(spans))})")


def _nothing_usable_text(path: Path, dropped: Dropped) -> str:
    if not dropped.examples:
        return f"data.urls: {path} is an empty tar, or holds no file with an extension"
    return (
        f"data.urls: {path} holds no usable sample: {dropped.text()}. A sample is KEY.jpg with KEY.txt, and a key ends"
        " at the first dot of the file name"
    )


def _cache_name(path: Path) -> str:
    stat = path.stat()
    extensions = (*IMAGE_EXTENSIONS, "txt", "json")
    text = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{extensions}|{_FORMAT}"
    return f"{path.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"


def _read_cache(cached: Path) -> ShardIndex | None:
    """Return the cached index, or None if there is none; one of another form counts as none."""
    parts = read_cache(cached)
    if parts is None:
        return None
    try:
        dropped = Dropped(**json.loads(str(parts["dropped"])))
        return ShardIndex(table=parts["table"], keys=parts["keys"], dropped=dropped)
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("cached index %s is damaged (%s); reading the tar again", cached, error)
        return None
