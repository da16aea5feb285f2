"""Index tars before the first run, or check that they are what was indexed.

cascade-train index data.urls=…
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from omegaconf import DictConfig

from cascade_train.assembly.build import build_node
from cascade_train.commands.inspect import DEFAULTS
from cascade_train.commands.parts.command_line import Command
from cascade_train.errors import ConfigError
from cascade_train.options import check_least

_SECONDS_BETWEEN_LINES = 30.0
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class IndexArgs:
    """Index tars before the first run, or check their index."""

    processes: int | None = None
    """Processes that read tars at once; null = as many as this machine has cores."""
    verify: bool = False
    """Read indexed tars too, and index those again whose content is another; exit code 1 where there is one."""
    task_index: int = 0
    """This job indexes every `task_count`-th tar, from this one."""
    task_count: int = 1
    """Jobs that share the tars; a last one with 1 joins what they indexed."""

    def __post_init__(self) -> None:
        check_least("processes", self.processes, 1, "null = one a core")
        check_least("task_count", self.task_count, 1, "1 = this job alone")
        if not 0 <= self.task_index < self.task_count:
            raise ConfigError(f"task_index={self.task_index} must lie in [0, task_count={self.task_count})")


def index(args: IndexArgs, cfg: DictConfig) -> int:
    """Index the tars, print how many, and return 0, or 1 where `verify` found others."""
    from cascade_train.data.webdataset import WebDataset  # heavy: numpy

    source = build_node(cfg.data, "data")
    joined = source.joined_tars() if isinstance(source, WebDataset) else None
    if joined is None:
        raise ConfigError(
            "data: this indexes tars that are neither piped nor compressed, as in 'data.urls=\"a/{00..99}.tar\"'"
        )
    begin, numbers = time.perf_counter(), range(args.task_index, len(joined.tars), args.task_count)
    processes = args.processes or len(os.sched_getaffinity(0))
    changed = sum(_counted(joined.index(numbers, processes=processes, again=args.verify), len(numbers)))
    damaged = joined.remove_damaged() if args.verify and args.task_count == 1 else []
    if damaged:
        _log.warning("The joined index was not what was made, and is made anew: %s", ", ".join(damaged))
    rest = "are as they were indexed" if args.verify else "had an index"
    seconds = time.perf_counter() - begin
    lines = [f"{changed} tars were indexed, {len(numbers) - changed} {rest} ({seconds:.0f} s)."]
    if args.task_count == 1:
        lines.append(f"{len(source.open())} samples.")
    sys.stdout.write("\n".join([*lines, ""]))
    return int(args.verify and (changed > 0 or bool(damaged)))


def _counted(done: Iterator[bool], total: int) -> Iterator[bool]:
    """Pass results on, and log from time to time how many there were."""
    last = time.monotonic()
    for count, each in enumerate(done, start=1):
        yield each
        if time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            _log.info("%d of %d tars", count, total)


COMMAND = Command(arguments=IndexArgs, run=index, run_defaults=DEFAULTS, shows_log=True)
