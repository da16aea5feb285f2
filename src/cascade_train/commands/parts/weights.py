"""What the commands that write weights and adapters share."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from cascade_train.errors import ConfigError


@dataclass(kw_only=True)
class WeightsArgs:
    """Which network weights or adapters belong to, and the number format that is written."""

    source: str
    """Weights or adapters: a run, its export, a folder, a file, a hub id."""
    model: str | None = None
    """Size of the network, an option of the group model; null = as the run or the tensors show."""
    module_filters: list[str] | None = field(default_factory=lambda: [".attn"])
    """Modules that a LoRA of the original was trained on, which its file does not say; null = all."""
    dtype: str | None = None
    """bf16 or fp32 for the weights that are written; null = as they are. Sums are fp32."""
    allow_any_target: bool = False
    """Build whatever classes the run's configuration names, as for components of your own; trust it first."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, "bf16", "fp32"):
            raise ConfigError(f"dtype={self.dtype} must be bf16, fp32 or null.")


def print_error(path: Path, error: float) -> None:
    """Print where an export lies and how it reads back."""
    sys.stdout.write(f"{path}: read back with a relative error of {error:.1e}\n")
