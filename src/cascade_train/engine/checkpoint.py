"""Checkpoints: directories that appear whole, verify themselves, and load on another number of ranks.

What goes into a checkpoint is decided by the loop; where a run lies by `run_directory`. Exports for
other programs do not live here.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.engine.durable_files import sync_directory
from cascade_train.engine.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    find_fault,
    hash_file,
    read_manifest,
    write_manifest,
)
from cascade_train.errors import ConfigError, RunError

log = logging.getLogger(__name__)

_VISIBLE = re.compile(r"step_(\d+)")
_HIDDEN = re.compile(r"\.step_(\d+)\.(saving|replaced|deleting)")
_OTHER_RANKS_FILE = re.compile(r"__[1-9]\d*_")


class CheckpointStore:
    """The checkpoints of one run: `<directory>/step_<n>/`.

    Attributes:
        directory: the folder of the checkpoints; made at the first save. All ranks must share its file system.
    """

    def __init__(self, directory: Path, *, keep_last: int | None, keep_every_steps: int | None) -> None:
        """Check the retention rule; touches no file.

        Args:
            directory: the folder of the checkpoints.
            keep_last: how many of the newest to keep; None = all.
            keep_every_steps: also keep every checkpoint whose step is a multiple of this; None = no others.

        Raises:
            ConfigError: a number below 1.
        """
        for key, value in (("keep_last", keep_last), ("keep_every_steps", keep_every_steps)):
            if value is not None and value < 1:
                raise ConfigError(f"checkpoint.{key}={value} must be at least 1, or null to switch it off")
        self.directory = directory
        self._keep_last = keep_last
        self._keep_every_steps = keep_every_steps

    def save(self, step: int, tensors: dict[str, Any], facts: dict[str, Any]) -> Path:
        """Write the checkpoint of `step`, then apply retention. Collective.

        A checkpoint of the same step is replaced once the new one is complete.

        Args:
            step: the optimizer step that the state belongs to.
            tensors: nested dict of tensors (sharded or plain) and plain values, with the same keys on all ranks.
            facts: what JSON can hold, equal on all ranks; readable without loading tensors.

        Returns:
            The checkpoint's directory.

        Raises:
            RunError: the disk is full or failed, or the ranks do not share it; on all ranks, nothing is left.
            AssertionError: `facts` differ between ranks.
        """
        hidden = self.directory / f".step_{step}.saving"
        from_rank_zero(lambda: self._prepare(hidden))
        try:
            _write_tensors(hidden, tensors)
            shares = from_every_rank(lambda: (_own_records(hidden), facts))
            if any(each != facts for _, each in shares):
                raise AssertionError(f"facts of step {step} differ between ranks: {[each for _, each in shares]}")
            files = {name: record for records, _ in shares for name, record in records.items()}
            return from_rank_zero(lambda: self._publish(hidden, Manifest(step=step, files=files, facts=facts)))
        except (RunError, AssertionError):
            if dist.get_rank() == 0:
                shutil.rmtree(hidden, ignore_errors=True)
            raise

    def newest(self) -> Path | None:
        """Return the checkpoint of the highest step that verifies, or None. Reads every byte of it.

        Damaged ones are skipped with a warning that names the file and what is wrong. Not collective: one
        rank asks and tells the others.
        """
        self._restore_replaced()
        for _, path in sorted(self._visible().items(), reverse=True):
            fault = find_fault(path)
            if fault is None:
                return path
            log.warning("the checkpoint %s is damaged and skipped: %s", path, fault)
        return None

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints that are there, damaged ones included, in order."""
        return sorted(self._visible())

    def load(self, path: Path, tensors: dict[str, Any]) -> dict[str, Any]:
        """Fill `tensors` in place from the checkpoint at `path` and return its facts. Collective.

        The number of ranks may differ from that of the save. Only load checkpoints that you trust: plain
        values are pickled.

        Args:
            path: a checkpoint, verified by `newest` or `find_fault`.
            tensors: as in `save`; plain values are replaced.

        Raises:
            ConfigError: keys, shapes or dtypes differ: a checkpoint of another model.
            RunError: a file is missing or unreadable.
        """
        facts = from_rank_zero(lambda: read_manifest(path).facts)
        try:
            state_dict_loader.load(tensors, storage_reader=FileSystemReader(path), planner=_ExactLoadPlanner(path))
        except CheckpointException as error:
            first = _first_failure(error)
            if isinstance(first, ConfigError):
                raise ConfigError(str(first)) from error
            raise RunError(f"the checkpoint {path} could not be loaded: {first!r}") from error
        return facts

    def _prepare(self, hidden: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._restore_replaced()
        for leftover in self._hidden():
            shutil.rmtree(leftover)
        hidden.mkdir()

    def _publish(self, hidden: Path, manifest: Manifest) -> Path:
        for name, record in manifest.files.items():
            file = hidden / name
            if not file.is_file() or file.stat().st_size != record.size:
                raise RunError(f"{file} of another rank is not visible to rank 0: all ranks must share run.dir")
        write_manifest(hidden, manifest)
        final = self.directory / f"step_{manifest.step}"
        replaced = self.directory / f".step_{manifest.step}.replaced"
        if final.exists():
            final.rename(replaced)
        hidden.rename(final)
        sync_directory(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)
        self._retain(manifest.step)
        return final

    def _retain(self, newest: int) -> None:
        """Delete what the rule does not keep; the one just written (`newest`) and damaged ones always stay."""
        if self._keep_last is None:
            return
        complete = [
            step
            for step, path in sorted(self._visible().items())
            if step <= newest and find_fault(path, hashes=False) is None
        ]
        for step in complete[: -self._keep_last]:
            if self._keep_every_steps is None or step % self._keep_every_steps:
                self._delete(step)

    def _delete(self, step: int) -> None:
        doomed = self.directory / f".step_{step}.deleting"
        try:
            (self.directory / f"step_{step}").rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("the old checkpoint of step %d could not be deleted: %s", step, error)

    def _visible(self) -> dict[int, Path]:
        if not self.directory.is_dir():
            return {}
        matches = ((_VISIBLE.fullmatch(path.name), path) for path in self.directory.iterdir() if path.is_dir())
        return {int(match[1]): path for match, path in matches if match}

    def _hidden(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return sorted(path for path in self.directory.iterdir() if _HIDDEN.fullmatch(path.name))

    def _restore_replaced(self) -> None:
        """Bring back a checkpoint that a crash caught between moving it aside and putting the new one in its place."""
        for path in self._hidden():
            final = path.with_name(path.name[1:].removesuffix(".replaced"))
            if path.name.endswith(".replaced") and not final.exists():
                path.rename(final)


class _ExactLoadPlanner(DefaultLoadPlanner):
    """Refuses a checkpoint whose keys, shapes or dtypes are not exactly those asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def create_local_plan(self) -> LoadPlan:
        """Compare, then plan as usual."""
        if self.metadata is None:
            raise RunError(f"the checkpoint {self._path} has no table of contents")
        saved = {key: _describe(entry) for key, entry in self.metadata.state_dict_metadata.items()}
        wanted = {key: _describe(value) for key, value in self.state_dict.items()}
        differing = sorted(key for key in saved.keys() | wanted.keys() if saved.get(key) != wanted.get(key))
        if differing:
            key = differing[0]
            raise ConfigError(
                f"{self._path} is a checkpoint of another model: {key} is {saved.get(key, 'absent')} there and "
                f"{wanted.get(key, 'absent')} in this run ({len(differing)} keys differ). Remedy: start with the "
                "model, task and optimizer of its run's config.yaml, or a new run with run.name=<new name>"
            )
        return super().create_local_plan()


def _describe(entry: object) -> str:
    if isinstance(entry, TensorStorageMetadata):
        return f"{entry.properties.dtype} {tuple(entry.size)}"
    if isinstance(entry, Tensor):
        return f"{entry.dtype} {tuple(entry.shape)}"
    return "a plain value"


def _write_tensors(hidden: Path, tensors: dict[str, Any]) -> None:
    """Write the tensors' files, synced to the disk. Collective; a failure of one rank reaches all."""
    try:
        state_dict_saver.save(tensors, storage_writer=FileSystemWriter(hidden, sync_files=True))
    except CheckpointException as error:
        first = _first_failure(error)
        free = shutil.disk_usage(hidden.parent).free / 2**30  # torch words a full disk as a wrong position in a file
        raise RunError(
            f"a checkpoint could not be written to {hidden.parent}, where {free:.2f} GiB are free: {first!r}"
        ) from first


def _first_failure(error: CheckpointException) -> BaseException:
    return error.failures[min(error.failures)][0]


def _own_records(hidden: Path) -> dict[str, FileRecord]:
    """Hash the files that this rank wrote (they are still in its page cache); rank 0 takes those of nobody."""
    rank = dist.get_rank()
    names = sorted(path.name for path in hidden.iterdir())
    mine = [n for n in names if (n.startswith(f"__{rank}_") if rank else not _OTHER_RANKS_FILE.match(n))]
    return {name: hash_file(hidden / name) for name in mine if name != MANIFEST_NAME}
