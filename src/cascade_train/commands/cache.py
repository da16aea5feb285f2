"""Compute latents and embeddings once, for trainings that read them.

cascade-train cache model=… task=… data=… out=cache/
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from omegaconf import DictConfig

from cascade_train.commands.parts.command_line import Command
from cascade_train.errors import ConfigError
from cascade_train.options import limit


@dataclass(kw_only=True)
class CacheArgs:
    """Compute latents and embeddings once, for trainings with data=cached."""

    out: str
    """Folder of the cache; units that are complete in it are kept."""
    captions: bool = True
    """Also hold the embeddings of captions; false = the run computes them, and needs the text encoder."""
    dtype: str | None = None
    """bf16 = half the size of latents; null = every tensor as its encoder makes it."""
    unit_samples: int = 1000
    """Samples of one unit: a tar that is written completely or not at all."""
    batch_size: int = 16
    """Images encoded at once."""
    task_index: int = 0
    """Which part of the units this process makes, from 0, e.g. task_index=$SLURM_ARRAY_TASK_ID."""
    task_count: int = 1
    """How many processes share the units."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, "bf16"):
            raise ConfigError(f"dtype={self.dtype} is unknown: bf16, or null to keep every tensor as it is made.")
        limit(self, "", "unit_samples", "batch_size", "task_count", least=1)
        if not 0 <= self.task_index < self.task_count:
            bounds = f"at least 0 and below task_count={self.task_count}"
            raise ConfigError(f"task_index={self.task_index} must be {bounds}, the number of processes.")


def cache(args: CacheArgs, cfg: DictConfig) -> int:
    """Make this process's part of a cache and print a summary; return 0."""
    from cascade_train.assembly.cache_making import make_cache  # heavy: torch and everything above it

    sys.stdout.write(f"{make_cache(cfg, **vars(args))}\n")
    return 0


COMMAND = Command(arguments=CacheArgs, run=cache, run_defaults={})
