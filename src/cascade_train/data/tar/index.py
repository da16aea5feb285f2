"""What is read from one tar before training, and its cache on disk: the index of its samples, verdicts of row filters.

Of the files, only their beginnings are read, and the json that filters judge.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from cascade_train.data.index.cache import (
    cache_file,
    default_cache_dir,
    header_facts,
    read_cache,
    user_cache_dir,
    write_cache,
)
from cascade_train.data.index.mapped import one_at_a_time
from cascade_train.data.index.row_filter import RowFilters
from cascade_train.data.index.rows import ABSENT, BEGINNING_BYTES, ROW_FIELDS, checksum
from cascade_train.data.tar.files import Tar
from cascade_train.data.tar.members import IMAGE_EXTENSIONS, PARTS, Dropped, Forward, Member, samples
from cascade_train.errors import ConfigError

TAR_FIELDS = ROW_FIELDS + [(f"{part}_{what}", "<i8") for part in ("image", *PARTS) for what in ("start", "bytes")]
_ARRAYS = ("table", "keys", "checksums")
_FORMAT = 2
_ABSENT = (0, 0, 0, 0, ABSENT)
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The usable samples of one shard, in its order."""

    table: np.ndarray  # (N,) with the fields of `TAR_FIELDS`; a missing part has 0 bytes at 0
    keys: np.ndarray  # (N,) bytes
    checksums: np.ndarray  # (N, 1 + len(PARTS)) int64, of the picture and the parts, see `ABSENT`
    dropped: Dropped

    def equals(self, other: ShardIndex) -> bool:
        """Return whether another index tells the same of its tar."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in _ARRAYS)
        return self.dropped == other.dropped and all(np.array_equal(one, two) for one, two in pairs)


def load_shard(tar: Tar, cache_dir: Path | None) -> ShardIndex:
    """Return the index of a tar that has places, from the cache if it is there, else from the headers.

    The cache lies in `cache_dir`, which must be writable; None = `.cascade_train_index` beside the tar if that can be
    written, else the user's cache folder, as for tars that are no local files. Raises as `scan_shard`.
    """
    cached = index_file(tar, cache_dir)
    shard = _cached_shard(cached)
    if shard is not None:
        return shard
    with one_at_a_time(cached.with_suffix(".lock")) if tar.is_remote else nullcontext():
        shard = _cached_shard(cached) or scan_shard(tar)
        write_shard(cached, shard, required=cache_dir is not None)
    return shard


def write_shard(cached: Path, shard: ShardIndex, *, required: bool) -> None:
    """Write the index of a tar to its file. Raises as `write_cache`."""
    dropped = np.array(json.dumps(asdict(shard.dropped)))
    write_cache(cached, {**{name: getattr(shard, name) for name in _ARRAYS}, "dropped": dropped}, required=required)


def scan_shard(tar: Tar) -> ShardIndex:
    """Build the index of a tar from its headers.

    A ConfigError where the tar is empty, compressed, damaged, not sorted by key, or has no usable sample.
    """
    rows, keys, checksums, dropped = [], [], [], Dropped(caption=tar.caption)
    with tar.open() as file:
        head = file.read(5)
        for name in (name for magic, name in _COMPRESSED.items() if head.startswith(magic)):
            raise ConfigError(
                f"data.urls: {tar.item.url} is compressed ({name}), so that samples have no place to be read at;"
                " decompress it (pictures gain nothing from it), or name it .tar.gz, .tar.bz2 or .tar.xz to stream it"
            )
        file.seek(0)
        for key, found in samples(
            tar.item.url, Forward(file, seekable=True), partial(_member_facts, set(tar.parts.values())), dropped
        ):
            parts = [found.get(part, _ABSENT) for part in PARTS]
            rows.append((0, *found["image"][:4], *(number for part in parts for number in part[2:4])))
            checksums.append([found["image"][4], *(part[4] for part in parts)])
            keys.append(key.encode(errors="surrogateescape"))
    if not rows and not dropped.examples:
        raise ConfigError(f"data.urls: {tar.item.url} is an empty tar, or holds no file with an extension")
    if not rows:
        raise ConfigError(
            f"data.urls: {tar.item.url} holds no usable sample: {dropped.text()}. A sample is KEY.jpg with"
            f" KEY.{dropped.caption}, and a key ends at the first dot of the file name"
        )
    table = np.array(rows, dtype=TAR_FIELDS)
    return ShardIndex(table=table, keys=np.array(keys), checksums=np.array(checksums), dropped=dropped)


def load_verdicts(
    tar: Tar, shard: ShardIndex, filters: RowFilters, cache_dir: Path | None, *, largest: int | None = None
) -> np.ndarray:
    """Return the verdicts of `RowFilters` on each sample, (N, 1 + filters) uint8, from the cache or the tar.

    A json of more than `largest` bytes counts as none. Raises as `load_shard`.
    """
    sizes = shard.table["json_bytes"].astype(np.int64)
    is_too_large = sizes > (np.iinfo(np.int64).max if largest is None else largest)
    index, limit = index_file(tar, cache_dir), f"-{largest}" if is_too_large.any() else ""
    cached = index.with_name(f"{index.stem}-filters-{filters.identity}{limit}.npz")
    verdicts = (read_cache(cached) or {}).get("verdicts")
    if verdicts is None or verdicts.shape != (len(shard.table), 1 + len(filters)):
        sizes[is_too_large] = 0
        verdicts = judge_shard(tar, shard.table["json_start"].tolist(), sizes.tolist(), filters)
        write_cache(cached, {"verdicts": verdicts}, required=cache_dir is not None)
    return verdicts


def judge_shard(tar: Tar, starts: list[int], sizes: list[int], filters: RowFilters) -> np.ndarray:
    """Read every sample's json once, none where its size is 0, and judge it. See `load_verdicts`."""
    verdicts = np.zeros((len(starts), 1 + len(filters)), dtype=np.uint8)
    with tar.open() as file:
        for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            file.seek(start)
            verdicts[row] = filters.verdicts(file.read(size) if size else None)
    return verdicts


def index_file(tar: Tar, cache_dir: Path | None) -> Path:
    """Return the file of a tar's cached index, in `cache_dir` as for `load_shard`; its name changes with the tar."""
    if cache_dir is None:
        cache_dir = user_cache_dir() if tar.is_remote else default_cache_dir(Path(tar.item.url))
    place = tar.item.url if tar.is_remote else Path(tar.item.url).resolve()
    extensions = (*IMAGE_EXTENSIONS, *tar.parts.values())
    text = f"{place}|{tar.item.size}|{tar.item.version}|{extensions}|{_FORMAT}"
    return cache_file(cache_dir, Path(tar.name).stem, text)


def _cached_shard(cached: Path) -> ShardIndex | None:
    """Return the cached index, or None if there is none; one of another form counts as none."""
    parts = read_cache(cached)
    if parts is None:
        return None
    try:
        dropped = Dropped(**json.loads(str(parts["dropped"])))
        checksums = parts.get("checksums", np.zeros((len(parts["table"]), 1 + len(PARTS)), dtype=np.int64))
        return ShardIndex(table=parts["table"], keys=parts["keys"], checksums=checksums, dropped=dropped)
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("cached index %s is damaged (%s); reading the tar again", cached, error)
        return None


def _member_facts(parts: Collection[str], member: Member) -> tuple[int, int, int, int, int]:
    """Return width and height of a picture, else zeros; start and size in bytes; the checksum of what makes samples."""
    width = height = crc = 0
    if member.extension in IMAGE_EXTENSIONS:
        width, height, crc = header_facts(member.read, member.size)
    elif member.extension in parts:
        crc = checksum(member.read(BEGINNING_BYTES), member.size)
    return width, height, member.start, member.size, crc
