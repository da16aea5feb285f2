"""The index of one tar file, read from its headers, and its cache on disk.

Payloads are skipped, except for the beginning of each picture, whose header gives its size.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cascade_train.data.decoding.decode import upright_size
from cascade_train.data.index.cache import default_cache_dir, read_cache, user_cache_dir, write_cache
from cascade_train.data.index.rows import ROW_FIELDS
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.data.tar.files import Tar
from cascade_train.data.tar.members import Forward, Member, samples
from cascade_train.data.tar.sample import IMAGE_EXTENSIONS, PARTS, Dropped, image_extension
from cascade_train.errors import ConfigError

TAR_FIELDS = ROW_FIELDS + [(f"{part}_{what}", "<i8") for part in ("image", *PARTS) for what in ("start", "bytes")]
_FORMAT = 2
_HEADER_BYTES = 64 * 1024
_LONGEST_HEADER_BYTES = 128 * 1024**2  # a member may claim any size
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The usable samples of one shard, in its order.

    Attributes:
        table: (N,) structured array with the fields of `TAR_FIELDS`; a missing part has 0 bytes at 0.
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
    width: int = 0
    height: int = 0


_ABSENT = _Span(start=0, size=0)


def load_shard(tar: Tar, cache_dir: Path | None) -> ShardIndex:
    """Return the index of a tar, from the cache if it is there, else from the headers.

    Args:
        tar: one that has places.
        cache_dir: where the cache lies; None = `.cascade_train_index` beside the tar if that can be written, else
            the user's cache folder, as for tars that are no local files.

    Raises:
        ConfigError: the tar cannot be indexed or holds no usable sample.
        RunError: its store fails.
    """
    cached = cache_file(tar, cache_dir)
    shard = _read_cache(cached)
    if shard is not None:
        return shard
    with _one_reader(cached, tar):
        shard = _read_cache(cached) or scan_shard(tar)
        parts = {"table": shard.table, "keys": shard.keys, "dropped": np.array(json.dumps(asdict(shard.dropped)))}
        write_cache(cached, parts, required=cache_dir is not None)
    return shard


def cache_file(tar: Tar, cache_dir: Path | None) -> Path:
    """Return where what was read from a tar is kept; the name changes with the tar. See `load_shard`."""
    if cache_dir is None:
        cache_dir = user_cache_dir() if tar.is_remote else default_cache_dir(Path(tar.item.url))
    place = tar.item.url if tar.is_remote else Path(tar.item.url).resolve()
    extensions = (*IMAGE_EXTENSIONS, *tar.parts.values())
    text = f"{place}|{tar.item.size}|{tar.item.version}|{extensions}|{_FORMAT}"
    return cache_dir / f"{Path(tar.name).stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"


@contextmanager
def _one_reader(cached: Path, tar: Tar) -> Iterator[None]:
    """Let one process of this machine read a remote tar while the others wait for what it keeps."""
    if not tar.is_remote:
        yield
        return
    lock = cached.with_suffix(".lock")
    with ExitStack() as held:
        with suppress(OSError):  # nowhere to keep anything: each reads for itself
            lock.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(lock.open("a")), fcntl.LOCK_EX)
        yield
    with suppress(OSError):  # where nothing may be removed, the empty file stays
        lock.unlink(missing_ok=True)


def scan_shard(tar: Tar) -> ShardIndex:
    """Build the index of a tar from its headers.

    Raises:
        ConfigError: the tar is empty, compressed, damaged, not sorted by key, or holds no usable sample.
        RunError: its store fails.
    """
    rows, keys, dropped = [], [], Dropped(caption=tar.caption)
    with tar.open() as file:
        _refuse_compressed(tar, file.read(5))
        file.seek(0)
        for key, spans in samples(tar.item.url, Forward(file, seekable=True), _span):
            extension = image_extension(spans)
            if extension is None or tar.caption not in spans:
                dropped.count(key, spans, no_image=extension is None)
                continue
            image = spans[extension]
            parts = (image, *(spans.get(part, _ABSENT) for part in tar.parts.values()))
            places = (number for part in parts for number in (part.start, part.size))
            rows.append((0, image.width, image.height, *places))
            keys.append(key.encode())
    if not rows:
        raise ConfigError(_nothing_usable_text(tar.item.url, dropped))
    return ShardIndex(table=np.array(rows, dtype=TAR_FIELDS), keys=np.array(keys), dropped=dropped)


def _refuse_compressed(tar: Tar, head: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise ConfigError(
                f"data.urls: {tar.item.url} is compressed ({name}), so that samples have no place to be read at;"
                " decompress it (pictures gain nothing from it), or name it .tar.gz, .tar.bz2 or .tar.xz to stream it"
            )


def _span(member: Member) -> _Span:
    width, height = _picture_size(member) if member.extension in IMAGE_EXTENSIONS else (0, 0)
    return _Span(start=member.start, size=member.size, width=width, height=height)


def _picture_size(member: Member) -> tuple[int, int]:
    """Return (width, height), or (0, 0) if the header cannot be read."""
    content = b""
    for limit in (
        _HEADER_BYTES,
        min(member.size, _LONGEST_HEADER_BYTES),
    ):  # large metadata may come before the size; webp wants the whole file
        content += member.read(limit - len(content))
        try:
            return upright_size(content)
        except UnreadableSampleError:
            continue
    return 0, 0


def _nothing_usable_text(path: str, dropped: Dropped) -> str:
    if not dropped.examples:
        return f"data.urls: {path} is an empty tar, or holds no file with an extension"
    return (
        f"data.urls: {path} holds no usable sample: {dropped.text()}. A sample is KEY.jpg with"
        f" KEY.{dropped.caption}, and a key ends"
        " at the first dot of the file name"
    )


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
