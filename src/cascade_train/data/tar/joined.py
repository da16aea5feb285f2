"""The index of all tars: what the index of each holds, one after another, without what row filters leave out.

Of few tars it is put together in memory at each start; of many it is kept in a folder and mapped (`mapped.py`).
"""

from __future__ import annotations

import functools
import glob
import hashlib
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.data.index.mapped import mapped
from cascade_train.data.index.row_filter import RowFilters
from cascade_train.data.index.rows import combine
from cascade_train.data.tar.files import Tar
from cascade_train.data.tar.index import (
    TAR_FIELDS,
    ShardIndex,
    index_file,
    load_shard,
    load_verdicts,
    scan_shard,
    write_shard,
)
from cascade_train.errors import RunError

MANY_TARS = 64
_FORMAT = 1
_INDEXED_AT_ONCE = 8  # remote tars, each with a buffer of 8 MiB
_log = logging.getLogger(__name__)

Allocate = Callable[[str, Any, int], np.ndarray]
"""Make the array of a name, a type and a length."""


@dataclass(frozen=True, kw_only=True)
class JoinedTars:
    """Tars that can be indexed, at least one, and what of them makes the index."""

    tars: Sequence[Tar]
    cache_dir: Path | None  # see `load_shard`
    filters: RowFilters
    largest_json: int | None  # bytes of a json that the filters read; null = any
    used: Sequence[bool]  # which parts of a sample, the picture first, its content's checksum covers

    def open(self) -> tuple[dict[str, np.ndarray], Path | None]:
        """Return table, keys and content of the samples, see `Index`, and the folder that they are mapped from, if any.

        What was left out is logged. Raises as `load_shard`, and a RunError where a tar cannot be read.
        """
        parts, folder = self._open()
        for line in parts.pop("dropped").tolist():
            _log.warning("%s", line)
        for line in parts.pop("judged").tolist():
            _log.info("%s", line)
        return parts, folder

    def index(self, numbers: Sequence[int], *, processes: int, again: bool) -> Iterator[bool]:
        """Index some of the tars in several processes; yield of each, as it is done, whether its index changed.

        `again` reads tars whose index is there too, and writes those anew that differ. Raises as `open`.
        """
        alone = [replace(self, tars=(self.tars[number],)) for number in numbers]
        remake = partial(JoinedTars._index_one, again=again)
        with ExitStack() as stack:
            if processes == 1:
                done: Iterator[bool] = map(remake, alone)
            else:
                pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=get_context("spawn")))
                done = (job.result() for job in as_completed([pool.submit(remake, each) for each in alone]))
            yield from done

    def _index_one(self, *, again: bool) -> bool:
        """Index the only tar. See `index`."""
        (tar,) = self.tars
        file = index_file(tar, self.cache_dir)
        changed = not file.is_file()
        shard = self._load(0)
        with _reading():
            if again and not changed and not shard.equals(found := scan_shard(tar)):
                for verdicts in file.parent.glob(f"{glob.escape(file.stem)}-filters-*"):
                    verdicts.unlink(missing_ok=True)
                for joined in file.parent.glob("joined-*"):  # one of them, and others, hold what the tar was
                    shutil.rmtree(joined, ignore_errors=True)
                write_shard(file, found, required=True)
                changed, shard = True, found
            if len(self.filters):
                load_verdicts(tar, shard, self.filters, self.cache_dir, largest=self.largest_json)
        return changed

    @property
    def folder(self) -> Path:
        """Where the index is kept if there are `MANY_TARS`; its name changes with any tar and option."""
        files = [index_file(tar, self.cache_dir) for tar in self.tars]
        text = repr((_FORMAT, [file.name for file in files], self.filters.identity, self.largest_json, self.used))
        return files[0].with_name(f"joined-{hashlib.sha256(text.encode()).hexdigest()[:16]}")

    def _open(self) -> tuple[dict[str, np.ndarray], Path | None]:
        if len(self.tars) >= MANY_TARS:
            folder = self.folder
            try:
                return mapped(folder, self._write), folder
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

    def _joined(self, load: Callable[[int], ShardIndex], allocate: Allocate) -> dict[str, np.ndarray]:
        """Return the arrays of all tars. Each tar is loaded twice: first its lengths alone are kept."""
        found = self._of_each(lambda number: self._lengths(number, load(number)))
        kept_by_tar, judged = self._kept([verdicts for *_, verdicts in found])
        total, key_bytes = sum(int(kept.sum()) for kept in kept_by_tar), max(width for width, *_ in found)
        table, content = allocate("table", TAR_FIELDS, total), allocate("content", np.uint64, total)
        keys, start = allocate("keys", f"S{key_bytes}", total), 0
        for number, kept in enumerate(kept_by_tar):
            shard, rows = load(number), slice(start, start := start + int(kept.sum()))
            table[rows], keys[rows] = shard.table[kept], shard.keys[kept]
            table["shard"][rows] = number
            content[rows] = combine(*shard.checksums[kept].T[list(self.used)])
        left_out = [text for _, text, _ in found if text]
        notes = {"dropped": np.array(left_out, dtype=np.str_), "judged": np.array(judged, dtype=np.str_)}
        return {"table": table, "keys": keys, "content": content, **notes}

    def _load(self, number: int) -> ShardIndex:
        with _reading():
            return load_shard(self.tars[number], self.cache_dir)

    def _lengths(self, number: int, shard: ShardIndex) -> tuple[int, str, np.ndarray]:
        """Return the bytes of a key, what was left out, and the verdicts of the filters, (N, 1 + filters) or (N, 0)."""
        tar, verdicts = self.tars[number], np.zeros((len(shard.table), 0), dtype=np.uint8)
        if len(self.filters):
            with _reading():
                verdicts = load_verdicts(tar, shard, self.filters, self.cache_dir, largest=self.largest_json)
        text = f"{tar.item.url}: left out {shard.dropped.text()}" if shard.dropped.examples else ""
        return shard.keys.dtype.itemsize, text, verdicts

    def _kept(self, verdicts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[str]]:
        """Return which samples of each tar pass the filters, (N,) bool, and lines on how many do."""
        if not len(self.filters):
            return [np.ones(len(each), dtype=bool) for each in verdicts], []
        kept, lines = self.filters.judged(np.concatenate(verdicts))
        return np.split(kept, np.cumsum([len(each) for each in verdicts])[:-1]), lines

    def _of_each(self, facts: Callable[[int], Any]) -> list[Any]:
        """Return facts of each tar, of remote ones several at a time.

        In random order, so that processes that start together read different tars instead of waiting for each other.
        """
        numbers = list(range(len(self.tars)))
        if not any(tar.is_remote for tar in self.tars):
            return list(map(facts, numbers))
        for tar in self.tars:
            if tar.store is not None:
                tar.store.prepare()
        order = random.SystemRandom().sample(numbers, len(numbers))
        with ThreadPoolExecutor(_INDEXED_AT_ONCE) as pool:
            found = dict(zip(order, pool.map(facts, order), strict=True))
        return [found[number] for number in numbers]


@contextmanager
def _reading() -> Iterator[None]:
    """Raise a RunError where a tar cannot be read, so that it is not taken for a folder that cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunError(f"data.urls: a tar cannot be read: {error}") from error
