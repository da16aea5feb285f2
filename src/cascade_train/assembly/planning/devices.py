"""Memory budgets; and memory and speed of GPUs by name, as their makers state them."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU: 10^9 bytes of memory, and TFLOP/s of dense bf16 products summed in fp32."""

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
"""Share of the host's free memory that a run on a CPU may fill, beside data workers."""

CONTEXT_BYTES = 600 * 10**6
"""CUDA context and the libraries' workspaces. Assumed, not measured."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory that a training must fit, and the keys and groups that the user set, which it keeps.

    `gb` is of each rank's device, in 10^9 bytes; on a CPU, the rank's share of its host's free memory. `host_gb` is
    that share beside a GPU.
    """

    gb: float
    on_cuda: bool = True
    host_gb: float = math.inf
    ranks: int = 1
    machine_ranks: int = 1
    kept: Collection[str] = ()

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory that a rank may fill beside a GPU."""
        return self.host_gb * 1e9 * HOST_USABLE

    def may_set(self, key: str) -> bool:
        """Whether the user set neither a key nor something in it, nor, of an optimizer, its group."""
        blocking = {key, "optimizer"} if key.startswith("optimizer") else {key}
        return not any(typed in blocking or typed.startswith(f"{key}.") for typed in self.kept)

    def usable_bytes(self, asked_gb: float | str | None = None) -> float:
        """Bytes that a run may fill of each device, or of `memory.budget_gb`."""
        gb = self.gb if asked_gb is None or isinstance(asked_gb, str) else asked_gb
        return gb * 1e9 * (USABLE if self.on_cuda else HOST_USABLE)


def free_host_bytes() -> int:
    """Free memory of this machine, or what a limit of this job's leaves (cgroup v2)."""
    system = Path("/proc/meminfo")
    if not system.is_file():  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = next(int(line.split()[1]) * 1024 for line in system.read_text().splitlines() if "MemAvailable" in line)
    return min([free, *_left_by_limits()])


def _left_by_limits() -> Iterator[int]:
    """Yield the bytes that each limit leaves: of this process's control group, and of those around it."""
    entries, root = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
    lines = entries.read_text().splitlines() if entries.is_file() else []
    own = root / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for group in (own, *own.parents):
        most, taken, parts = (group / f"memory.{name}" for name in ("max", "current", "stat"))
        if most.is_file() and (limit := most.read_text().strip()) != "max":
            cached = (line.split()[1] for line in parts.read_text().splitlines() if line.startswith("inactive_file"))
            yield int(limit) - int(taken.read_text()) + int(next(cached))


def as_gb(count: float) -> str:
    """A number of bytes in GB, with as many digits as matter."""
    gb = count / 1e9
    return f"{gb:.1f}" if gb >= 9.95 else f"{gb:.2f}" if gb >= 0.095 or gb == 0 else f"{gb:.1g}"
