"""GPUs by name: what they hold, and how fast they multiply. Figures of their makers, none measured.

And the memory that a rank of a run has here.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU: gigabytes (10^9 bytes) of memory, and TFLOP/s of dense bf16 matrix products with fp32 accumulation."""

    gb: int
    tflops: float
    source: str


DEVICES = {
    "h100": Device(gb=80, tflops=989.0, source="NVIDIA H100 SXM data sheet, half of the figure with sparsity"),
    "h200": Device(gb=141, tflops=989.0, source="NVIDIA H200 SXM data sheet, half of the figure with sparsity"),
    "a100": Device(gb=80, tflops=312.0, source="NVIDIA A100 80GB SXM data sheet"),
    "rtx4090": Device(gb=24, tflops=165.2, source="NVIDIA Ada architecture paper, appendix A"),
}

TF32_SHARE = 0.5
"""Of `tflops`, for fp32 products, which use TF32: so on all of `DEVICES`, by the same sources."""

SIZES_GB = (16, 24, 48, 80, 141)
"""Memory of common GPUs."""

ASSUMED_MFU = 0.4
"""Share of a device's peak that training reaches. Assumed, not measured."""

USABLE = 0.95
"""Share of a device's memory that a run may fill: the allocator's fragments take some."""

HOST_USABLE = 0.8
"""Share of the host's free memory that a run on a CPU may fill: data workers and the cache of files take some."""

CONTEXT_BYTES = 600 * 10**6
"""CUDA context and the libraries' workspaces. Assumed, not measured."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory of a rank.

    Attributes:
        gb: of its device, in 10^9 bytes; on a CPU, of what is free on its host.
        on_cuda: whether it is a GPU's.
        host_gb: of its share of what is free on its host, beside a GPU.
    """

    gb: float
    on_cuda: bool
    host_gb: float = math.inf

    @property
    def usable_bytes(self) -> float:
        """Bytes of the device that a run may fill."""
        return self.gb * 1e9 * (USABLE if self.on_cuda else HOST_USABLE)

    @property
    def usable_host_bytes(self) -> float:
        """Bytes of host memory that a run on a GPU may use."""
        return self.host_gb * 1e9 * HOST_USABLE


def own_room(device: torch.device, machine_ranks: int) -> Room:
    """Return the free memory of a device, this process's context included; on a CPU, a rank's share of it."""
    host = free_host_bytes() / machine_ranks / 1e9
    if device.type == "cuda":
        import torch

        free, whole = torch.cuda.mem_get_info(device)
        return Room(gb=min(whole, free + CONTEXT_BYTES) / 1e9, on_cuda=True, host_gb=host)
    return Room(gb=host, on_cuda=False)


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
