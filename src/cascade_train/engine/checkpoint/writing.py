"""From tensors to files: which rank writes what, copies in host memory, torch's distributed checkpoint, a thread."""

from __future__ import annotations

import copy
import io
import math
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from cascade_train.distributed.parallelize import local
from cascade_train.errors import RunError

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # here, since a thread that saves cannot scope it

_ENTRY_BYTES = 4096
"""More than torch's framing of one tensor in a file."""

_ALIGNMENT = 64
"""Bytes; of the copies in a block."""

_COPY_AHEAD = 10_000_000
"""Bytes that are on their way from the device while others are written."""


@dataclass(frozen=True)
class Layout:
    """A state without its values: the form of each by key, the keys that this rank writes, and torch's plan."""

    form: Mapping[str, object]
    mine: Sequence[str]
    plan: SavePlan


class Snapshot(DefaultSavePlanner):
    """What this rank writes of a state: its own shards, and an even part of those that several ranks hold alike.

    Until `stage` is called it reads the state's own tensors; afterwards copies, so that training may go on. The layout
    of a state `before` is used again where this one has the same form.
    """

    def __init__(self, state: Mapping[str, Any], before: Layout | None = None) -> None:
        super().__init__()
        super().set_up_planner(dict(state))
        form = {key: _form(value) for key, value in self.state_dict.items()}
        again = before if before is not None and before.form == form else None
        mine = own_share(self.state_dict) if again is None else again.mine
        self.state_dict = {key: self.state_dict[key] for key in mine}
        self.mappings = {key: self.mappings[key] for key in mine}
        self.layout = Layout(form, mine, super().create_local_plan()) if again is None else again
        self.staged = False

    @property
    def bytes_needed(self) -> int:
        """How much this rank is about to write, framing included."""
        tensors = [value for value in self.state_dict.values() if isinstance(value, Tensor)]
        return sum(local(t).nbytes for t in tensors) + _ENTRY_BYTES * len(self.state_dict)

    def stage(self, memory: HostMemory) -> None:
        """Copy everything to the host; once this returns, the state may change, and nothing here refers to it."""
        self.state_dict = memory.take(self.state_dict)
        self.staged = True

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: `__init__` did it."""

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank writes."""
        return self.layout.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """This rank's shard, or the plain value."""
        value = self.state_dict[index.fqn]
        return local(value) if isinstance(value, Tensor) else value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Turn a plain value into bytes; a RunError for what would run code when it loads."""
        written = super().transform_object(write_item, object)
        if write_item.type == WriteItemType.BYTE_IO:
            try:
                torch.load(io.BytesIO(written.getbuffer()), weights_only=True)
            except Exception as error:
                raise RunError(
                    f"{write_item.index.fqn} cannot be saved: only numbers, strings, None and tensors, in lists and "
                    f"dicts, load again without running code ({str(error).splitlines()[0]})"
                ) from error
        return written


class HostMemory:
    """Host memory for copies of a state, kept from save to save; pinned where the state is on a device."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def reserve(self, values: Mapping[str, Any]) -> None:
        """Allocate, in one block, what copies of the values' local shards need and is not there yet."""
        shards = {key: local(value) for key, value in values.items() if isinstance(value, Tensor)}
        kept = {key: each for key, each in self._buffers.items() if key in shards and _form(each) == _form(shards[key])}
        missing = {key: shard for key, shard in shards.items() if key not in kept}
        starts = [0, *accumulate(-(-shard.nbytes // _ALIGNMENT) * _ALIGNMENT for shard in missing.values())]
        self._buffers = kept
        block = _block(starts[-1], pinned=any(shard.is_cuda for shard in shards.values()))
        for (key, shard), start in zip(missing.items(), starts[:-1], strict=True):
            piece = torch.from_numpy(block[start : start + shard.nbytes])  # with a storage of its own, which is written
            self._buffers[key] = piece.view(shard.dtype).view(shard.shape)

    @torch.no_grad()
    def take(self, values: Mapping[str, Any], *, wait: bool = True) -> dict[str, Any]:
        """Copies of tensors' local shards, on the host, and of plain values, by key; `wait`: for the device."""
        self.reserve(values)
        copies = {
            key: self._buffers[key].copy_(local(value), non_blocking=True)
            if isinstance(value, Tensor)
            else copy.deepcopy(value)
            for key, value in values.items()
        }
        if wait and any(isinstance(value, Tensor) and value.is_cuda for value in values.values()):
            torch.cuda.current_stream().synchronize()
        return copies


def _block(size: int, *, pinned: bool) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Host memory whose pages are mapped; torch's pinned tensors take up to twice their size."""
    block = np.empty(size, dtype=np.uint8)
    if pinned and size:
        cuda, address = torch.cuda.cudart(), block.ctypes.data
        torch.cuda.check_error(cuda.cudaHostRegister(address, size, 0))
        weakref.finalize(block, cuda.cudaHostUnregister, address)
    else:
        block.fill(0)
    return block


def _form(value: object) -> object:
    """All of a value but its numbers; None for plain ones."""
    if isinstance(value, DTensor):
        return value.shape, value.dtype, value.placements, value.device_mesh
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def own_share(flat: Mapping[str, Any]) -> list[str]:
    """Keys that this rank writes: of equal shards (replicas, plain values) one each, balanced by bytes."""
    loads: dict[int, list[int]] = {}
    mine = []
    for key in sorted(flat, key=lambda key: (-_whole_bytes(flat[key]), key)):
        number, replicas = _replica(flat[key])
        load = loads.setdefault(replicas, [0] * replicas)
        writer = load.index(min(load))
        load[writer] += _whole_bytes(flat[key]) or 1
        if writer == number:
            mine.append(key)
    return mine


def _replica(value: object) -> tuple[int, int]:
    """Which copy of its shard this rank holds, and how many there are."""
    if not isinstance(value, DTensor):
        return dist.get_rank(), dist.get_world_size()
    mesh, number, replicas = value.device_mesh, 0, 1
    place = mesh.get_coordinate()
    if place is None:
        return -1, 1
    for dimension, placement in enumerate(value.placements):
        if placement.is_replicate():
            number = number * mesh.size(dimension) + place[dimension]
            replicas *= mesh.size(dimension)
    return number, replicas


def _whole_bytes(value: object) -> int:
    return math.prod(value.shape) * value.element_size() if isinstance(value, Tensor) else 0


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """No random id and no path, which nobody reads, so that equal states become equal files."""
        return StorageMeta()


def write_files(directory: Path, snapshot: Snapshot, group: ProcessGroup | None) -> None:
    """Write a snapshot's files into an empty directory that all ranks share, synced; RunError on all. Collective."""
    ahead = 0 if snapshot.staged else _COPY_AHEAD
    writer = _Writer(directory, sync_files=True, per_thread_copy_ahead=ahead)
    try:
        alone = dist.get_world_size() == 1  # which need not send itself the plan and the table of contents
        state_dict_saver.save({}, storage_writer=writer, planner=snapshot, process_group=group, no_dist=alone)
    except CheckpointException as error:
        first = first_failure(error)
        free = shutil.disk_usage(directory.parent).free / 2**30  # torch words a full disk as a wrong position in a file
        raise RunError(
            f"a checkpoint could not be written to {directory.parent}, where {free:.2f} GiB are free: {first!r} on "
            f"rank {min(error.failures)}. Remedy: free space, or mend the disk; the same command continues from the "
            "newest checkpoint"
        ) from first


def first_failure(error: CheckpointException) -> BaseException:
    """Error of the lowest rank that failed."""
    return error.failures[min(error.failures)][0]


def check_space(directory: Path, bytes_by_rank: Iterable[int]) -> None:
    """Refuse (RunError) to write what does not fit on the file system of an existing directory."""
    needed = sum(bytes_by_rank)
    needed += needed // 100 + 2**20  # the table of contents and the file system's own
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise RunError(
            f"a checkpoint of {needed / 2**30:.3f} GiB does not fit in {directory}, where {free / 2**30:.3f} GiB are "
            "free; nothing was written. Remedy: free space there, a smaller "
            " checkpoint.keep_last, or another run.dir"
        )


class Background:
    """A daemon thread that does one job after the other; it starts with the first.

    One for all jobs, since the allocator keeps memory for each thread that there was. Data workers may be forked
    meanwhile: a child neither runs the thread nor unwinds its stack, so nothing that was buffered is written twice.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[tuple[Future[None], Callable[[], object]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], object]) -> Future[None]:
        """Queue a job; the thread computes on the device that is current when it starts."""
        if self._thread is None:
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._thread = threading.Thread(target=self._run, args=(device,), name=self._name, daemon=True)
            self._thread.start()
        job: Future[None] = Future()
        self._jobs.put((job, work))
        return job

    def end(self) -> None:
        """Wait for all jobs and end the thread; the next job starts another."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # each thread begins on the first device
        while (queued := self._jobs.get()) is not None:
            job, work = queued
            try:
                work()
            except BaseException as error:
                job.set_exception(error)
            else:
                job.set_result(None)
            del queued, job, work  # else the tensors of a job stay until the next one
