"""The index of tars: of each the index of its samples and the verdicts of row filters, cached; and that of all.

Of a tar only the beginnings of its files are read, and the json that filters judge. The index of all is what that of
each holds, one after another, without what row filters leave out: of few tars put together in memory at each start, of
many kept in a folder and mapped.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cascade_train.data.index.cache import (
    cache_file,
    default_cache_dir,
    header_facts,
    read_cache,
    user_cache_dir,
    write_cache,
)
from cascade_train.data.index.row_filter import RowFilters
from cascade_train.data.index.rows import (
    ABSENT,
    BEGINNING_BYTES,
    ROW_FIELDS,
    changed_arrays,
    checksum,
    combine,
    first_names,
    mapped,
    one_at_a_time,
)
from cascade_train.data.tar.files import Tar
from cascade_train.data.tar.members import IMAGE_EXTENSIONS, PARTS, Dropped, Forward, Member, samples
from cascade_train.errors import ConfigError, RunError

MANY_TARS = 64
TAR_FIELDS = ROW_FIELDS + [(f"{part}_{what}", "<i8") for part in ("image", *PARTS) for what in ("start", "bytes")]
_ARRAYS = ("table", "keys", "checksums")
_FORMAT = 1
_FORMAT_OF_ALL = 1
_AT_ONCE = 2**20  # rows that are checked together
_INDEXED_AT_ONCE = 8  # remote tars, each with a buffer of 8 MiB
_ABSENT = (0, 0, 0, 0, ABSENT)
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_log = logging.getLogger(__name__)

Allocate = Callable[[str, Any, int], np.ndarray]
"""Make the array of a name, a type and a length."""


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The usable samples of one shard, in its order."""

    table: np.ndarray  # (N,) with the fields of `TAR_FIELDS`; a missing part has 0 bytes at 0
    keys: np.ndarray  # (N,) bytes
    checksums: np.ndarray  # (N, 1 + len(PARTS)) int64, of the picture and the parts, see `ABSENT`
    dropped: Dropped

    def equals(self, other: ShardIndex) -> bool:
        """Whether another index tells the same of its tar."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in _ARRAYS)
        return self.dropped == other.dropped and all(np.array_equal(one, two) for one, two in pairs)


def load_shard(tar: Tar, cache_dir: Path | None) -> ShardIndex:
    """Index of a tar, cached in `cache_dir`; None = beside the tar, else in the user's cache folder."""
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
    """Index of a tar from its headers; a ConfigError where it is damaged, not sorted by key, or of no use."""
    rows, keys, checksums, dropped = [], [], [], Dropped()
    with tar.open() as file:
        head = file.read(5)
        for name in (name for magic, name in _COMPRESSED.items() if head.startswith(magic)):
            remedy = "decompress it, or name it .tar.gz, .tar.bz2 or .tar.xz to stream it"
            raise ConfigError(f"data.urls: {tar.item.url} is compressed ({name}), so it has no index; {remedy}")
        file.seek(0)
        for key, members in samples(
            tar.item.url,
            Forward(file, seekable=True),
            partial(_member_facts, set(tar.parts.values())),
            tar.parts,
            dropped,
        ):
            parts = [members.get(part, _ABSENT) for part in PARTS]
            rows.append((0, *members["image"][:4], *(number for part in parts for number in part[2:4])))
            checksums.append([members["image"][4], *(part[4] for part in parts)])
            keys.append(key.encode(errors="surrogateescape"))
    if not rows and not dropped.examples:
        raise ConfigError(f"data.urls: {tar.item.url} is an empty tar, or holds no file with an extension")
    if not rows:
        form = f"A sample is KEY.jpg with KEY.{tar.caption}, and a key ends at the first dot of the file name"
        raise ConfigError(f"data.urls: {tar.item.url} holds no usable sample: {dropped.text(tar.caption)}. {form}")
    table = np.array(rows, dtype=TAR_FIELDS)
    return ShardIndex(table=table, keys=np.array(keys), checksums=np.array(checksums), dropped=dropped)


def load_verdicts(
    tar: Tar, shard: ShardIndex, filters: RowFilters, cache_dir: Path | None, *, largest: int | None = None
) -> np.ndarray:
    """Verdicts on each sample, (N, 1 + filters) uint8, cached; a json above `largest` bytes is none."""
    sizes = shard.table["json_bytes"].astype(np.int64)
    is_too_large = sizes > (np.iinfo(np.int64).max if largest is None else largest)
    index, limit = index_file(tar, cache_dir), f"-{largest}" if is_too_large.any() else ""
    cached = index.with_name(f"{index.stem}-filters-{filters.identity}{limit}.npz")
    verdicts = (read_cache(cached) or {}).get("verdicts")
    if verdicts is None or verdicts.shape != (len(shard.table), 1 + len(filters)):
        sizes[is_too_large] = 0
        verdicts = np.zeros((len(sizes), 1 + len(filters)), dtype=np.uint8)
        with tar.open() as file:
            for row, (start, size) in enumerate(zip(shard.table["json_start"].tolist(), sizes.tolist(), strict=True)):
                file.seek(start)
                verdicts[row] = filters.verdicts(file.read(size) if size else None)
        write_cache(cached, {"verdicts": verdicts}, required=cache_dir is not None)
    return verdicts


def index_file(tar: Tar, cache_dir: Path | None) -> Path:
    """File of a tar's cached index, in `cache_dir` as for `load_shard`; its name changes with the tar."""
    if cache_dir is None:
        cache_dir = user_cache_dir() if tar.is_remote else default_cache_dir(Path(tar.item.url))
    place = tar.item.url if tar.is_remote else Path(tar.item.url).resolve()
    extensions = (*IMAGE_EXTENSIONS, *tar.parts.values())
    text = f"{place}|{tar.item.size}|{tar.item.version}|{extensions}|{_FORMAT}"
    return cache_file(cache_dir, Path(tar.name).stem, text)


def _cached_shard(cached: Path) -> ShardIndex | None:
    parts = read_cache(cached)
    if parts is None:
        return None
    try:
        dropped = Dropped(**json.loads(str(parts["dropped"])))
        return ShardIndex(table=parts["table"], keys=parts["keys"], checksums=parts["checksums"], dropped=dropped)
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("cached index %s is damaged (%s); reading the tar again", cached, error)
        return None


def _member_facts(parts: Collection[str], member: Member) -> tuple[int, int, int, int, int]:
    """Width and height of a picture, else zeros; start and size in bytes; the checksum of what makes samples."""
    width = height = crc = 0
    if member.extension in IMAGE_EXTENSIONS:
        width, height, crc = header_facts(member.read_at, member.size)
    elif member.extension in parts:
        crc = checksum(member.read(BEGINNING_BYTES), member.size)
    return width, height, member.start, member.size, crc


@dataclass(frozen=True, kw_only=True)
class JoinedTars:
    """Tars that can be indexed, at least one, and what of them makes the index."""

    tars: Sequence[Tar]
    cache_dir: Path | None  # see `load_shard`
    filters: RowFilters
    largest_json: int | None  # bytes of a json that the filters read; null = any
    used: Sequence[bool]  # which parts of a sample, the picture first, its content's checksum covers
    needed: Literal["caption", "json"]  # the part without which a sample is left out

    def open(self) -> tuple[dict[str, np.ndarray], Path | None]:
        """Table, keys and content of `Index`, and the folder they are mapped from; logs what is left out."""
        parts, folder = self._open()
        for line in parts.pop("dropped").tolist():
            _log.warning("%s", line)
        for line in parts.pop("judged").tolist():
            _log.info("%s", line)
        return parts, folder

    def index(self, numbers: Sequence[int], *, processes: int, again: bool) -> Iterator[bool]:
        """Index some tars in processes; yield whether each changed. `again` reads those with an index, too."""
        alone = [replace(self, tars=(self.tars[number],)) for number in numbers]
        folders = {index_file(tar, self.cache_dir).parent for tar in self.tars}  # a joined index lies beside the first
        remake = partial(JoinedTars._index_one, again=again, folders=folders)
        with ExitStack() as stack:
            if processes == 1:
                done: Iterator[bool] = map(remake, alone)
            else:
                pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=get_context("spawn")))
                done = (job.result() for job in as_completed([pool.submit(remake, tar) for tar in alone]))
            yield from done

    def _index_one(self, *, again: bool, folders: Collection[Path]) -> bool:
        (tar,) = self.tars
        file = index_file(tar, self.cache_dir)
        changed = not file.is_file()
        shard = self._load(0)
        with reading_tars():
            if again and not changed and not shard.equals(scanned := scan_shard(tar)):
                for verdicts in file.parent.glob(f"{glob.escape(file.stem)}-filters-*"):
                    verdicts.unlink(missing_ok=True)
                for joined in itertools.chain.from_iterable(folder.glob("joined-*") for folder in folders):
                    shutil.rmtree(joined, ignore_errors=True)  # one of them, and others, hold what the tar was
                write_shard(file, scanned, required=True)
                changed, shard = True, scanned
            if len(self.filters):
                load_verdicts(tar, shard, self.filters, self.cache_dir, largest=self.largest_json)
        return changed

    def remove_damaged(self) -> list[str]:
        """Compare the joined index with the digests of its making; remove it where files differ, and return those."""
        folder = self.folder
        folders = [folder, *(path for path in folder.glob("*") if path.is_dir())]
        changed = [str(file) for place in folders for file in changed_arrays(place)]
        if changed:
            shutil.rmtree(folder)
        return changed

    @property
    def folder(self) -> Path:
        """Where the index is kept if there are `MANY_TARS`; its name changes with any tar and option."""
        files = [index_file(tar, self.cache_dir) for tar in self.tars]
        options = self.filters.identity, self.largest_json, self.used, self.needed
        text = repr((_FORMAT_OF_ALL, [file.name for file in files], *options))
        return files[0].with_name(f"joined-{hashlib.sha256(text.encode()).hexdigest()[:16]}")

    def _open(self) -> tuple[dict[str, np.ndarray], Path | None]:
        if len(self.tars) >= MANY_TARS:
            folder = self.folder
            try:
                return mapped(folder, self._write, self._check_bounds), folder
            except OSError as error:
                _log.warning("the index of %d tars is not kept: %s: %s", len(self.tars), folder, error)
        return self._joined(functools.cache(self._load), lambda _, dtype, count: np.empty(count, dtype)), None

    def _write(self, folder: Path) -> None:
        def allocate(name: str, dtype: Any, count: int) -> np.ndarray:
            file = folder / f"{name}.npy"
            array: np.ndarray = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=(count,))
            with file.open("r+b") as opened:  # on a full disk an error here, not a signal when it is written
                os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
            return array

        parts = self._joined(self._load, allocate)
        for name in ("dropped", "judged"):
            np.save(folder / f"{name}.npy", parts[name])

    def _check_bounds(self, parts: Mapping[str, np.ndarray]) -> None:
        """Raise a ValueError where a row lies outside the tars."""
        table, keys, content = (parts[name] for name in ("table", "keys", "content"))
        size_T = np.array([tar.item.size for tar in self.tars], dtype=np.int64)
        if not len(table) == len(keys) == len(content):
            raise ValueError("its arrays differ in length")
        for start in range(0, len(table), _AT_ONCE):
            rows = table[start : start + _AT_ONCE]
            shard_N = rows["shard"]
            if shard_N[0] < 0 or shard_N[-1] >= len(size_T) or (np.diff(shard_N) < 0).any():
                raise ValueError(f"a row after {start} names no tar")
            for part in ("image", *PARTS):
                start_N, bytes_N = rows[f"{part}_start"], rows[f"{part}_bytes"]
                if (np.minimum(start_N, bytes_N) < 0).any() or (start_N > size_T[shard_N] - bytes_N).any():
                    raise ValueError(f"a row after {start} lies outside its tar")

    def _joined(self, load: Callable[[int], ShardIndex], allocate: Allocate) -> dict[str, np.ndarray]:
        """Join the arrays of all tars. Each tar is loaded twice: first its lengths alone are kept."""
        facts = self._of_each(lambda number: self._lengths(number, load(number)))
        kept_by_tar, judged = self._kept([usable for _, _, usable, _ in facts], [verdicts for *_, verdicts in facts])
        total, key_bytes = sum(int(kept.sum()) for kept in kept_by_tar), max(width for width, *_ in facts)
        table, content = allocate("table", TAR_FIELDS, total), allocate("content", np.uint64, total)
        keys, start = allocate("keys", f"S{key_bytes}", total), 0
        for number, kept in enumerate(kept_by_tar):
            shard, rows = load(number), slice(start, start := start + int(kept.sum()))
            table[rows], keys[rows] = shard.table[kept], shard.keys[kept]
            table["shard"][rows] = number
            content[rows] = combine(*shard.checksums[kept].T[list(self.used)])
        left_out = [text for _, text, *_ in facts if text]
        notes = {"dropped": np.array(left_out, dtype=np.str_), "judged": np.array(judged, dtype=np.str_)}
        return {"table": table, "keys": keys, "content": content, **notes}

    def _load(self, number: int) -> ShardIndex:
        with reading_tars():
            return load_shard(self.tars[number], self.cache_dir)

    def _lengths(self, number: int, shard: ShardIndex) -> tuple[int, str, np.ndarray, np.ndarray]:
        """Bytes of a key, what is left out, the usable samples, and the filters' verdicts on these (N, 1 + filters)."""
        tar, usable = self.tars[number], shard.table[f"{self.needed}_start"] > 0
        verdicts = np.zeros((len(usable), 0), dtype=np.uint8)
        if len(self.filters):
            with reading_tars():
                verdicts = load_verdicts(tar, shard, self.filters, self.cache_dir, largest=self.largest_json)
        texts = [shard.dropped.text(tar.caption)] if shard.dropped.examples else []
        if not usable.all():
            names = first_names([key.decode(errors="replace") for key in shard.keys[~usable][:6].tolist()])
            texts.append(f"{(~usable).sum()} keys without .{tar.parts[self.needed]} ({names})")
        text = f"{tar.item.url}: left out {'; '.join(texts)}" if texts else ""
        return shard.keys.dtype.itemsize, text, usable, verdicts[usable]

    def _kept(self, usable: Sequence[np.ndarray], verdicts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[str]]:
        """Which samples of each tar are usable and pass the filters, (N,) bool, and lines on how many do."""
        if not any(map(len, verdicts)):
            text = f"none of {sum(map(len, usable))} samples has .{self.tars[0].parts[self.needed]} for its caption"
            raise ConfigError(f"data.urls: {text}. Name a key of the json by data.captions.key=caption; txt = KEY.txt")
        if not len(self.filters):
            return list(usable), []
        passed, lines = self.filters.judged(np.concatenate(verdicts))
        kept_by_tar = [mask.copy() for mask in usable]
        ends = np.cumsum([len(rows) for rows in verdicts])
        for kept, mine in zip(kept_by_tar, np.split(passed, ends[:-1]), strict=True):
            kept[kept] = mine
        return kept_by_tar, lines

    def _of_each(self, facts: Callable[[int], Any]) -> list[Any]:
        """Facts of each tar, of remote ones several at a time."""
        numbers = list(range(len(self.tars)))
        if not any(tar.is_remote for tar in self.tars):
            return list(map(facts, numbers))
        for tar in self.tars:
            if tar.store is not None:
                tar.store.prepare()
        order = random.SystemRandom().sample(numbers, len(numbers))
        with ThreadPoolExecutor(_INDEXED_AT_ONCE) as pool:
            results = dict(zip(order, pool.map(facts, order), strict=True))
        return [results[number] for number in numbers]


@contextmanager
def reading_tars() -> Iterator[None]:
    """Raise a RunError where a tar cannot be read, so that it is not taken for a folder that cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunError(f"data.urls: a tar cannot be read: {error}") from error
