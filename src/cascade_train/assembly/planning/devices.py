"""GPUs by name: their memory, and how fast they multiply. Figures of their makers, none measured."""

from __future__ import annotations

from dataclasses import dataclass


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


def as_gb(count: float) -> str:
    """Return a number of bytes in GB, with as many digits as matter."""
    gb = count / 1e9
    return f"{gb:.1f}" if gb >= 9.95 else f"{gb:.2f}" if gb >= 0.095 or gb == 0 else f"{gb:.1g}"
