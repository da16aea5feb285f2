"""The process group and the (replicate, shard) mesh. There is always one, of size 1x1 when alone.

Nothing here knows a model, a task or a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from cascade_train.errors import ConfigError

ParallelMode = Literal["auto", "single", "ddp", "fsdp", "hsdp"]


SET_UP_SECONDS = 7200.0
"""How long ranks wait for each other outside of steps, where one alone may load, hash or write very much."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among its peers.

    Attributes:
        rank: number of this process, 0 to ranks - 1.
        ranks: number of processes.
        machine_ranks: number of processes on this machine; 1 where the launcher does not say.
        device: where this process computes.
    """

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
    """Join the process group that torchrun describes, or make one of a single rank; leave it in order.

    Collective. On CUDA, tensors on the host go through gloo and tensors on the device through nccl.
    After an error the group is left without the final barrier: the peers may never reach it.

    Raises:
        ConfigError: more processes on this machine than it has GPUs.
    """
    world = _join()
    try:
        yield world
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _join() -> World:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cuda and local_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{local_ranks} processes on a machine with {torch.cuda.device_count()} GPUs: each needs its own. "
            f"Use --nproc_per_node {torch.cuda.device_count()} or fewer; in a step of srun fewer --ntasks-per-node, "
            "without --gpus-per-task, which hides the other GPUs."
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    patient = timedelta(seconds=SET_UP_SECONDS)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, ranks = _meet(patient)
        dist.init_process_group(
            backend, timeout=patient, store=store, rank=rank, world_size=ranks, device_id=device if cuda else None
        )
    else:
        dist.init_process_group(backend, timeout=patient, store=dist.HashStore(), rank=0, world_size=1)
    return World(rank=dist.get_rank(), ranks=dist.get_world_size(), machine_ranks=local_ranks, device=device)


def _meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return where the ranks exchange addresses, this rank's number, and how many there are. Collective.

    torchrun keeps its store over a restart, with the addresses of the ranks that have ended: each attempt looks below a
    name of its own.
    """
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}", store), rank, ranks


def mesh_shape(
    mode: ParallelMode, ranks: int, *, shard_size: int | None, machine_ranks: int, fits: bool
) -> tuple[int, int]:
    """Return (replicate, shard) sizes for a parallel mode.

    Args:
        mode: auto chooses single alone, ddp where the training state fits a device, else fsdp.
        ranks: number of processes.
        shard_size: ranks that share one copy of the weights in hsdp; None = those of a machine.
        machine_ranks: number of processes on each machine.
        fits: whether weights, gradients and optimizer state fit every device unsharded.

    Raises:
        ConfigError: a mode or shard size that these ranks cannot form.
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
    """Return the (replicate, shard) mesh of the given sizes. Collective."""
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))
