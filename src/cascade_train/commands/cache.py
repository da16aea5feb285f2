"""Make latents and embeddings once: `cascade-train cache model=… task=… data=… out=cache/`.

Thin: takes its own arguments off the command line, composes the rest as training does, and fills the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

from omegaconf import DictConfig

from cascade_train.commands.arguments import help_text, parse_verb
from cascade_train.config.error_messages import exit_code
from cascade_train.config.launch import compose_and_run
from cascade_train.errors import ConfigError

DTYPES = (None, "bf16")


@dataclass(kw_only=True)
class CacheArgs:
    """Arguments of `cascade-train cache`, beside those of the run that will train from the cache."""

    out: str
    """Folder that the cache goes to; what is whole in it is kept."""
    captions: bool = True
    """Also hold what the text encoder makes of captions; false = the run computes it, and needs the encoder."""
    dtype: str | None = None
    """bf16 = half the size of latents; null = every tensor as its encoder makes it."""
    unit_samples: int = 1000
    """Samples of one unit, which is a tar that is written whole or not at all."""
    batch_size: int = 16
    """Pictures encoded at once."""
    task_index: int = 0
    """Which part of the units this process makes, from 0, e.g. task_index=$SLURM_ARRAY_TASK_ID."""
    task_count: int = 1
    """How many processes share the units."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype} is unknown: bf16, or null to keep every tensor as it is made.")
        for key in ("unit_samples", "batch_size", "task_count"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)} must be 1 or more.")
        if not 0 <= self.task_index < self.task_count:
            raise ConfigError(
                f"task_index={self.task_index} must be at least 0 and below task_count={self.task_count}, the number"
                " of processes that share the work."
            )


def cache(args: CacheArgs, cfg: DictConfig) -> int:
    """Make this process's part of a cache and say what there is; return the exit code.

    Raises:
        ConfigError: something that cannot be cached, with the reason.
        RunError: something the world did.
    """
    from cascade_train.assembly.cache_making import CacheOptions, make_cache  # heavy: torch and everything above it

    report = make_cache(cfg, CacheOptions(**vars(args)))
    sys.stdout.write(f"{report}\n")
    return 0


def launch(argv: Sequence[str]) -> int:
    """Make what `argv` describes and return the exit code: 0 done, 1 stopped by the world, 2 refused."""
    names = {field.name for field in fields(CacheArgs)}
    own = [argument for argument in argv if argument.partition("=")[0] in names]
    rest = [argument for argument in argv if argument not in own]
    if {"-h", "--help"} & set(argv):
        sys.stdout.write(f"{help_text(CacheArgs)}\nAll other arguments are the run's: python -m cascade_train --help\n")
        return 0
    parsed: list[CacheArgs] = []
    code = exit_code(lambda: parsed.append(parse_verb(CacheArgs, own)))
    return code or compose_and_run(rest, partial(cache, parsed[0]))


def main() -> None:
    """Parse the arguments, fill the cache, and exit."""
    sys.exit(launch(sys.argv[1:]))


if __name__ == "__main__":
    main()
