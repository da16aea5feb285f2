"""The checkpoints of a run: directories that appear whole, verify themselves, and load on any number of ranks."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cascade_train.distributed.consensus import from_every_rank, from_rank_zero, own_group
from cascade_train.engine.checkpoint.folder import (
    BEST,
    EVALUATED,
    MANIFEST_NAME,
    CheckpointFolder,
    FileRecord,
    Manifest,
    Retention,
    find_fault,
    hash_file,
    last_logged,
    read_manifest,
    write_manifest,
)
from cascade_train.engine.checkpoint.loading import load_files
from cascade_train.engine.checkpoint.writing import Background, HostMemory, Layout, Snapshot, check_space, write_files
from cascade_train.errors import RunError

log = logging.getLogger(__name__)

_OTHER_RANKS_FILE = re.compile(r"__[1-9]\d*_")
_SLOWEST_WRITE = timedelta(hours=2)
"""How long a rank that has written waits for one that still writes."""


class CheckpointStore:
    """The checkpoints of one run: `<directory>/step_<n>/`, on a file system that all ranks share.

    `metrics` is the run's `metrics.jsonl`, which has the retention's metric. With `asynchronous`, `save` waits for
    copies on the host only, and a thread writes them; the constructor is collective then, since the threads of all
    ranks get a group of their own, whose exchanges meet no other.
    """

    def __init__(
        self,
        directory: Path,
        *,
        retention: Retention | None = None,
        metrics: Path | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.directory = directory
        self._folder = CheckpointFolder(directory)
        self._retention = retention or Retention()
        self._metrics = metrics
        self._memory = HostMemory()
        self._layout: Layout | None = None
        self._prepared: Future[None] | None = None
        self._group = own_group(_SLOWEST_WRITE) if asynchronous else None
        self._background = Background(name="checkpoints")
        self._in_flight: Future[None] | None = None
        self._begun = 0.0
        self._has_warned = False
        self._slowest_seconds = 0.0

    def prepare(self, state: Callable[[], dict[str, Any]]) -> None:
        """Let the thread plan saves of such a state and allocate memory for copies, once. Not collective."""
        if self._group is not None and self._prepared is None and self._layout is None:
            tensors = state()
            self._prepared = self._background.begin(lambda: self._plan(tensors))

    def _plan(self, tensors: dict[str, Any]) -> Snapshot:
        snapshot = Snapshot(tensors, self._layout)
        self._layout = snapshot.layout
        if self._group is not None:
            self._memory.reserve(snapshot.state_dict)
        return snapshot

    def save(self, step: int, tensors: dict[str, Any], facts: dict[str, Any]) -> Path:
        """Save the checkpoint of `step`, then apply retention; return its directory. Collective.

        An asynchronous store returns once everything is copied to the host, after waiting for an earlier save; `wait`
        raises what fails later. A checkpoint of the same step is replaced once the new one is complete. `tensors` is a
        nested dict of tensors (sharded or plain) and plain values, of the same keys on all ranks; `facts` are JSON
        values, equal on all ranks. A RunError, on all ranks, leaves nothing.
        """
        self.wait()
        if (prepared := self._prepared) is not None:
            self._prepared = None
            from_every_rank(prepared.result)
        snapshot = self._plan(tensors)
        hidden = self._folder.hidden(step, "saving")
        needed = from_every_rank(lambda: snapshot.bytes_needed)
        from_rank_zero(lambda: self._prepare(hidden, needed))
        self._begun = time.monotonic()
        if self._group is None:
            self._write(hidden, snapshot, step, facts)
        else:
            snapshot.stage(self._memory)
            kept = copy.deepcopy(facts)
            self._in_flight = self._background.begin(lambda: self._write(hidden, snapshot, step, kept))
        return self._folder.path(step)

    @property
    def failed(self) -> bool:
        """Whether the unfinished save has failed on this rank; never waits. `wait` raises that on all ranks."""
        return self._in_flight is not None and self._in_flight.done() and self._in_flight.exception() is not None

    @property
    def save_seconds(self) -> float:
        """The longest time that a save took beside the loop on this rank; an unfinished one counts so far."""
        is_writing = self._in_flight is not None and not self._in_flight.done()
        return max(self._slowest_seconds, time.monotonic() - self._begun if is_writing else 0.0)

    def wait(self) -> None:
        """Finish the unfinished save, if there is one, and raise on all ranks what it raised. Collective then."""
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            from_every_rank(flight.result)

    def close(self) -> None:
        """Finish the unfinished save and only log if it failed: the run ends with another error. Not collective."""
        flight, self._in_flight = self._in_flight, None
        try:
            if flight is not None:
                flight.result()
        except Exception as error:
            log.warning("the checkpoint that was being written is lost: %s", error)
        self._background.end()

    def abandon(self) -> None:
        """Abandon the unfinished save: for an end that cannot wait. Not collective."""
        self._in_flight, self._background = None, Background(name="checkpoints")

    def newest(self) -> Path | None:
        """Checkpoint of the highest step that verifies, byte by byte; None = none does. For one rank.

        Others are skipped with a warning.
        """
        self._folder.restore_replaced()
        for path in reversed(self._folder.visible().values()):
            fault = find_fault(path)
            if fault is None:
                return path
            log.warning("the checkpoint %s is damaged and skipped: %s", path, fault)
        return None

    def steps(self) -> list[int]:
        """Steps of all checkpoints, damaged ones included, in order."""
        return list(self._folder.visible())

    def load(self, path: Path, tensors: dict[str, Any], *, optimizer: bool = True) -> dict[str, Any]:
        """Fill `tensors` in place from a checkpoint of any number of ranks, and return its facts. Collective.

        Without `optimizer`, the optimizers' state is neither in `tensors` nor read. A ConfigError for a checkpoint of
        another model; a RunError for a file that is unreadable or could run code.
        """
        manifest = from_rank_zero(lambda: read_manifest(path))
        load_files(path, manifest, tensors, optimizer=optimizer)
        return manifest.facts

    def _prepare(self, hidden: Path, needed: list[int]) -> None:
        try:
            self._folder.prepare(hidden)
            check_space(self.directory, needed)
        except OSError as error:
            raise RunError(
                f"no checkpoint can be written to {self.directory}: {error}. Remedy: make it writable; the same "
                "command continues from the newest checkpoint"
            ) from error
        except RunError:
            hidden.rmdir()
            raise

    def _write(self, hidden: Path, snapshot: Snapshot, step: int, facts: dict[str, Any]) -> None:
        """Write, compare, publish, and apply retention. Collective over the store's group."""
        try:
            write_files(hidden, snapshot, self._group)
            shares = from_every_rank(lambda: (_own_records(hidden), facts), group=self._group)
            if any(each != facts for _, each in shares):
                raise AssertionError(f"facts of step {step} differ between ranks: {[each for _, each in shares]}")
            files = {name: record for records, _ in shares for name, record in records.items()}
            manifest = Manifest(step=step, files=files, facts=facts)
            from_rank_zero(lambda: self._publish(hidden, manifest), group=self._group)
            self._slowest_seconds = max(self._slowest_seconds, time.monotonic() - self._begun)
        except Exception:
            if dist.get_rank() == 0:
                shutil.rmtree(hidden, ignore_errors=True)
            raise

    def _publish(self, hidden: Path, manifest: Manifest) -> None:
        for name, record in manifest.files.items():
            file = hidden / name
            if not file.is_file() or file.stat().st_size != record.size:
                raise RunError(f"{file} of another rank is not visible to rank 0: all ranks must share run.dir")
        facts = {**manifest.facts, **self._ranking(manifest.step)}
        write_manifest(hidden, dataclasses.replace(manifest, facts=facts))
        self._folder.publish(hidden, manifest.step)
        self._retain(manifest.step)

    def _ranking(self, step: int) -> Mapping[str, Any]:
        """Fact that ranks this checkpoint; none, with one warning, where the metric was not logged yet."""
        metric = self._retention.best_metric
        if metric is None or self._metrics is None or metric.startswith(EVALUATED):
            return {}
        found = last_logged(self._metrics, metric, step=step)
        if found is None and not self._has_warned:
            self._has_warned = True
            log.warning(
                "checkpoint.best_metric=%s: %s has no such value up to step %d, so that no checkpoint is kept for it. "
                "Its keys are those of the lines there; validate/loss needs validate.every_steps.",
                metric, self._metrics, step,
            )  # fmt: skip
        return {} if found is None else {BEST: found}

    def _retain(self, newest: int) -> None:
        """Delete what the rule does not keep; the one just written (`newest`) and damaged ones always stay."""
        if self._retention.keep_last is None:
            return
        manifests = {step: each for step, each in self._folder.complete().items() if step <= newest}
        for step, reasons in self._retention.reasons(manifests).items():
            if not reasons:
                self._folder.delete(step)


def _own_records(hidden: Path) -> dict[str, FileRecord]:
    """Hash the files that this rank wrote (they are still in its page cache); rank 0 also takes those of no rank."""
    rank = dist.get_rank()
    names = sorted(path.name for path in hidden.iterdir())
    mine = [n for n in names if (n.startswith(f"__{rank}_") if rank else not _OTHER_RANKS_FILE.match(n))]
    return {name: hash_file(hidden / name) for name in mine if name != MANIFEST_NAME}
