"""From tensors to files: which rank writes what, copies in host memory, torch's distributed checkpoint, and a thread.

Directories, manifests and retention belong to store.py.
"""

from __future__ import annotations

import copy
import io
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

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

_ENTRY_BYTES = 4096
"""More than torch's framing of one tensor in a file."""

_COPY_AHEAD = 10_000_000
"""Bytes that are on their way from the device while others are written."""


class Snapshot(DefaultSavePlanner):
    """What this rank writes of a state: its own shards, and an even part of those that several ranks hold alike.

    Until `stage` is called it reads the state's own tensors; afterwards copies, so that training may go on. The state
    is a nested dict of tensors (sharded or plain) and plain values, with the same keys on all ranks.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        super().set_up_planner(dict(state))
        share = own_share(self.state_dict)
        self.state_dict = {key: self.state_dict[key] for key in share}
        self.mappings = {key: self.mappings[key] for key in share}
        self.staged = False

    @property
    def bytes_needed(self) -> int:
        """How much this rank is about to write, framing included."""
        tensors = [value for value in self.state_dict.values() if isinstance(value, Tensor)]
        return sum(local(t).nbytes for t in tensors) + _ENTRY_BYTES * len(self.state_dict)

    def stage(self, memory: HostMemory) -> None:
        """Copy everything to the host; once this returns, the state may change, and nothing here refers to it."""
        super().create_local_plan()
        self.state_dict = memory.take(self.state_dict)
        self.staged = True

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: `__init__` did it."""

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank writes."""
        return self.plan if self.staged else super().create_local_plan()

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return this rank's shard, or the plain value."""
        value = self.state_dict[index.fqn]
        return local(value.detach()) if isinstance(value, Tensor) else value

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
    """Host buffers for copies of a state; kept from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of tensors' local shards, on the host, and of plain values, by key; syncs the device once."""
        copies: dict[str, Any] = {}
        on_device = False
        for key, value in values.items():
            if not isinstance(value, Tensor):
                copies[key] = copy.deepcopy(value)
                continue
            shard = local(value.detach())
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != shard.shape or buffer.dtype != shard.dtype:
                buffer = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=shard.is_cuda)
            copies[key] = buffer.copy_(shard, non_blocking=True)
            on_device |= shard.is_cuda
        if on_device:
            torch.cuda.current_stream().synchronize()
        self._buffers = {key: each for key, each in copies.items() if isinstance(each, Tensor)}
        return copies


def own_share(flat: Mapping[str, Any]) -> list[str]:
    """Return the keys that this rank writes: of equal shards (replicas, plain values) one each, balanced by bytes."""
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
    """Return which copy of its shard this rank holds, and how many there are."""
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


def write_files(directory: Path, snapshot: Snapshot, group: ProcessGroup | None) -> None:
    """Write a snapshot's files into an empty directory that all ranks share, synced; RunError on all. Collective."""
    ahead = 0 if snapshot.staged else _COPY_AHEAD
    writer = FileSystemWriter(directory, sync_files=True, per_thread_copy_ahead=ahead)
    try:
        state_dict_saver.save({}, storage_writer=writer, planner=snapshot, process_group=group)
    except CheckpointException as error:
        first = first_failure(error)
        free = shutil.disk_usage(directory.parent).free / 2**30  # torch words a full disk as a wrong position in a file
        raise RunError(
            f"a checkpoint could not be written to {directory.parent}, where {free:.2f} GiB are free: {first!r} on "
            f"rank {min(error.failures)}. Remedy: free space, or mend the disk; the same command continues from the "
            "newest checkpoint"
        ) from first


def first_failure(error: CheckpointException) -> BaseException:
    """Return the error of the lowest rank that failed."""
    return error.failures[min(error.failures)][0]


def check_space(directory: Path, bytes_by_rank: Iterable[int]) -> None:
    """Refuse (RunError) to write what does not fit on the file system of an existing directory."""
    needed = sum(bytes_by_rank)
    needed += needed // 100 + 2**20  # the table of contents and the file system's own
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise RunError(
            f"a checkpoint of {needed / 2**30:.3f} GiB does not fit in {directory}, where {free / 2**30:.3f} GiB are "
            "free; nothing was written. Remedy: free space there (cascade-train checkpoints prune), a "
            "smaller checkpoint.keep_last, or another run.dir"
        )


class Piece(Future[None]):
    """A piece of work for the thread, and its outcome: `result` waits for it, and raises what it raised."""

    def __init__(self) -> None:
        super().__init__()
        self._begun, self._ended = time.monotonic(), math.inf

    @property
    def failed(self) -> bool:
        """Whether the work has ended in an error; never waits."""
        return self.done() and self.exception() is not None

    @property
    def seconds(self) -> float:
        """How long the work took, or has taken so far."""
        return min(time.monotonic(), self._ended) - self._begun

    def do(self, work: Callable[[], None]) -> None:
        """Do the work and keep what it raises."""
        try:
            work()
        except BaseException as error:
            self._ended = time.monotonic()
            self.set_exception(error)
        else:
            self._ended = time.monotonic()
            self.set_result(None)


class Background:
    """A daemon thread that does one piece of work after the other; it starts with the first.

    One for all pieces, since the allocator keeps memory for each thread that there was. Data workers may be forked
    meanwhile: a child neither runs the thread nor unwinds its stack, so nothing that was buffered is written twice.
    """

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._pieces: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], None]) -> Piece:
        """Queue a piece of work; the thread computes on the device that is current when it starts."""
        if self._thread is None:
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._thread = threading.Thread(target=self._run, args=(device,), name=self._name, daemon=True)
            self._thread.start()
        piece = Piece()
        self._pieces.put(partial(piece.do, work))
        return piece

    def end(self) -> None:
        """Wait for all pieces and end the thread; the next piece starts another."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # each thread begins on the first device
        while (do := self._pieces.get()) is not None:
            do()
