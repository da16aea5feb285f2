"""The process group and the (replicate, shard) mesh. There is always one, of size 1x1 when alone."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from cascade_train.distributed.rng import allow_tf32
from cascade_train.errors import ConfigError, RunError

T = TypeVar("T")

ParallelMode = Literal["auto", "single", "ddp", "fsdp", "hsdp"]

_GROUPS = itertools.count()
"""Numbers the groups that this process joins, alike on all ranks."""

MEETING_SECONDS = 300.0
"""Timeout of the start of all ranks."""

SET_UP_SECONDS = 7200.0
"""Timeout outside of steps, where a rank may load, hash or write much."""

DEVICE_GRACE_SECONDS = 60.0
"""Longer timeout of exchanges on the device: those of the hosts fail with a message."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process, number `rank` of `ranks`; `machine_ranks` of them are on this machine (1 if unknown)."""

    rank: int
    ranks: int
    machine_ranks: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to people."""
        return self.rank == 0


@contextmanager
def process_group() -> Iterator[World]:
    """Join the process group that torchrun describes, or make one of a single rank. Collective.

    On CUDA, tensors on the host go through gloo and tensors on the device through nccl.
    After an error the group is left without the final barrier, which the other ranks may never reach. On several CUDA
    ranks it is not left then: nccl would first wait for kernels that need the others. `__main__` ends such a process.
    """
    if dist.is_initialized():
        raise RunError(
            "this process has joined a process group already: another training of this library runs in it, in a thread,"
            " or a program that calls it has made one. Wait for it, or train in a process of its own"
        )
    allow_tf32()
    world = _join()
    leaves = world.device.type != "cuda" or world.ranks == 1
    try:
        yield world
        dist.barrier()
        leaves = True
    finally:
        if leaves:
            dist.destroy_process_group()


def _join() -> World:
    cuda = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.init()  # a driver that fails does so here, and not while ranks meet
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        device = _outside_of_main_thread(partial(_meet, backend))
    else:
        device = first_device()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if cuda:
        torch.cuda.set_device(device)
    set_timeout([], SET_UP_SECONDS)
    machine_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return World(rank=dist.get_rank(), ranks=dist.get_world_size(), machine_ranks=machine_ranks, device=device)


def first_device() -> torch.device:
    """Device of a process that works alone: the first GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _outside_of_main_thread(work: Callable[[], T]) -> T:
    """Run `work` in another thread: this one handles signals meanwhile, which it cannot while in C++."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    return outcome.result()


def _meet(backend: str) -> torch.device:
    """Make the process group of all ranks and return this rank's device. Collective.

    torchrun's store keeps the addresses of ended groups over restarts and the runs of a sweep, hence the prefix.
    """
    meeting = timedelta(seconds=MEETING_SECONDS)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        shared, rank, ranks = next(rendezvous("env://", timeout=meeting))
        store = dist.PrefixStore(f"attempt_{attempt}/group_{next(_GROUPS)}", shared)
        device = own_device(store, rank, ranks)
        cuda = device if device.type == "cuda" else None
        dist.init_process_group(backend, timeout=meeting, store=store, rank=rank, world_size=ranks, device_id=cuda)
        store.set_timeout(timedelta(seconds=SET_UP_SECONDS))
    except (RuntimeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        is_reported = os.environ.get("LOCAL_RANK", "0") == "0"  # once on each machine
        raise RunError(_not_met(error), shared=not is_reported) from error
    return device


def _not_met(error: Exception) -> str:
    address, port = (os.environ.get(key, "not set") for key in ("MASTER_ADDR", "MASTER_PORT"))
    reason = (str(error).splitlines() or [""])[0].rstrip(". ")
    return (
        f"Rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} on {socket.gethostname()} does not meet the others "
        f"at MASTER_ADDR={address}, MASTER_PORT={port}: {reason}. Ranks wait {MEETING_SECONDS / 60:.0f} minutes for "
        "each other. Every machine must resolve and reach that address, the port must be free on the machine of rank "
        "0, and every rank must have started. In a job of SLURM, set both in sbatch/env.sh."
    )


def own_device(store: dist.Store, rank: int, ranks: int) -> torch.device:
    """GPU with the rank's number on its machine, or the only visible one, or the CPU. Collective.

    Ranks compare theirs in the store: a ConfigError on all where two have the same GPU, or only some have one.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    index = local_rank if local_rank < gpus else 0
    gpu = str(torch.cuda.get_device_properties(index).uuid) if gpus else ""
    store.set(f"gpu_of_{rank}", json.dumps([gpu, gpus, socket.gethostname()]))
    seen: dict[str, int] = {}
    for other, note in enumerate(store.multi_get([f"gpu_of_{rank}" for rank in range(ranks)])):
        gpu, count, host = json.loads(note)
        if gpu in seen and gpu:
            raise ConfigError(
                f"ranks {seen[gpu]} and {other} have the same GPU, one of {count} that they see on {host}: each needs "
                f"its own. Use --nproc_per_node {count} or fewer; in a step of srun fewer --ntasks-per-node."
            )
        if seen and (gpu == "") != ("" in seen):
            raise ConfigError(
                f"rank {other} on {host} sees {count} GPUs, unlike rank 0: all ranks compute on GPUs, or all on CPUs. "
                "Ask for GPUs on every node, or hide them with CUDA_VISIBLE_DEVICES=."
            )
        seen[gpu] = other
    return torch.device("cuda", index) if gpus else torch.device("cpu")


@contextmanager
def step_timeout(groups: Sequence[dist.ProcessGroup], seconds: float) -> Iterator[None]:
    """Limit how long exchanges within the block wait, in the default group and others."""
    set_timeout(groups, seconds)
    try:
        yield
    finally:
        set_timeout(groups, SET_UP_SECONDS)


def set_timeout(groups: Sequence[dist.ProcessGroup], seconds: float) -> None:
    """Set how long later exchanges wait, in the default group and others."""
    default = dist.group.WORLD
    assert default is not None
    for group in {default, *groups}:
        for device in group._device_types:
            late = DEVICE_GRACE_SECONDS if device.type == "cuda" else 0.0
            group._get_backend(device)._set_default_timeout(timedelta(seconds=seconds + late))


def mesh_shape(
    mode: ParallelMode, ranks: int, *, shard_size: int | None, machine_ranks: int, fits: bool
) -> tuple[int, int]:
    """(replicate, shard) sizes for a parallel mode.

    auto is single alone, ddp where the training state `fits` every device unsharded, else fsdp. In hsdp `shard_size`
    ranks share one copy of the weights; None = the `machine_ranks`, those of each machine.
    """
    if mode == "single" and ranks > 1:
        raise ConfigError(
            f"parallel=single runs on one rank, but {ranks} were started: unsynchronised copies would train apart. "
            "Use parallel=auto, ddp or fsdp, or start one process."
        )
    if mode == "auto":
        mode = "ddp" if fits else "fsdp"
    if mode == "fsdp":
        return 1, ranks
    if mode != "hsdp":
        return ranks, 1
    shard = machine_ranks if shard_size is None else shard_size
    if ranks % shard:
        raise ConfigError(
            f"parallel.shard_size={shard} does not divide the {ranks} ranks. Choose a divisor, or the same number of "
            "processes on every machine."
        )
    return ranks // shard, shard


def build_mesh(world: World, shape: tuple[int, int]) -> DeviceMesh:
    """(replicate, shard) mesh of the given sizes. Collective."""
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))
