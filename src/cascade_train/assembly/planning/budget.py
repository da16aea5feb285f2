"""The memory that a training must fit: of a device, and what is free on this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from cascade_train.assembly.planning.devices import CONTEXT_BYTES, HOST_USABLE, USABLE


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a training must fit, and the settings that stay as they are.

    Attributes:
        gb: of each rank's device, in 10^9 bytes; on a CPU, of its share of what is free on its host.
        on_cuda: whether it is a GPU's.
        host_gb: of a rank's share of what is free on its host, beside a GPU.
        ranks: of the run.
        machine_ranks: of a machine.
        kept: keys and groups that the user set.
    """

    gb: float
    on_cuda: bool = True
    host_gb: float = math.inf
    ranks: int = 1
    machine_ranks: int = 1
    kept: Collection[str] = ()

    def usable_bytes(self, asked_gb: float | str | None = None) -> float:
        """Return the bytes that a run may fill of each device, or of what `memory.budget_gb` asks for."""
        gb = self.gb if asked_gb is None or isinstance(asked_gb, str) else asked_gb
        return gb * 1e9 * (USABLE if self.on_cuda else HOST_USABLE)


def free_gb(device: torch.device, machine_ranks: int) -> tuple[float, float]:
    """Return GB free on a device, this process's context included, and a rank's share of what is free on its host.

    On a CPU the share, and no limit beside it.
    """
    host = free_host_bytes() / machine_ranks / 1e9
    if device.type != "cuda":
        return host, math.inf
    free, whole = torch.cuda.mem_get_info(device)
    return min(whole, free + CONTEXT_BYTES) / 1e9, host


def free_host_bytes() -> int:
    """Return what programs may still take of this machine's memory, or of this job's limit (cgroup v2)."""
    system, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if not system.is_file():  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = next(int(line.split()[1]) * 1024 for line in system.read_text().splitlines() if "MemAvailable" in line)
    most, taken, parts = (group / f"memory.{name}" for name in ("max", "current", "stat"))
    if not most.is_file() or (limit := most.read_text().strip()) == "max":
        return free
    cached = next(int(line.split()[1]) for line in parts.read_text().splitlines() if line.startswith("inactive_file"))
    return min(free, int(limit) - int(taken.read_text()) + cached)
