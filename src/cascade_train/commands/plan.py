"""Compute memory, time and disk of a run before it begins.

    cascade-train plan experiment=finetune_c_3b ranks=8 device=h100

Takes the overrides of the run, and needs no GPU, weights or network. Data is opened where it is on this machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from cascade_train.commands.inspect import allow_unreadable, library_log
from cascade_train.commands.parts.command_line import Command
from cascade_train.config.schema import limit
from cascade_train.errors import ConfigError

NOT_GIVEN = "(not given)"
"""In the place of a file that the run needs and a plan does not."""


@dataclass(kw_only=True)
class PlanArgs:
    """Report parameters, memory, largest micro-batches, length, time and disk of a run before it begins."""

    ranks: int | None = None
    """Processes of the run, one for each device; null = as many as torchrun has started, else 1."""
    device: str = "h100"
    """What it is to run on: h100, h200, a100 or rtx4090; gives the time, and what fits."""
    json: bool = False
    """Print JSON for programs, in bytes and seconds."""
    samples: bool = True
    """Open the data, where it is on this machine; false = leave it alone."""

    def __post_init__(self) -> None:
        limit(self, "", "ranks", least=1)


def plan(args: PlanArgs, cfg: DictConfig) -> int:
    """Print the plan and return 0; a ConfigError for an unknown device, and where the run would be refused."""
    from cascade_train.assembly.planning.devices import DEVICES  # heavy: torch and everything above it
    from cascade_train.assembly.planning.plan import make_plan
    from cascade_train.assembly.planning.samples import look

    if args.device not in DEVICES:
        raise ConfigError(f"device={args.device} is unknown: choose {', '.join(DEVICES)}.")
    samples = None
    if args.samples:
        allow_unreadable(cfg.data)
        with library_log() as log:
            samples = look(cfg, log)
    found = make_plan(cfg, ranks=ranks_of(args), device=args.device, samples=samples)
    if args.json:
        sys.stdout.write(f"{json.dumps(dataclasses.asdict(found), indent=2)}\n")
    else:
        sys.stdout.write("\n".join([*found.lines(), ""]))
    return 0


def checked(args: PlanArgs, cfg: DictConfig) -> DictConfig:
    """Return a configuration as a training on `ranks` has it; files that it must name may be left out."""
    from cascade_train.config.arguments import declared_roles
    from cascade_train.config.preflight import preflight

    for key in sorted(OmegaConf.missing_keys(cfg)):
        node, _, name = key.rpartition(".")
        options = OmegaConf.to_container(OmegaConf.select(cfg, node), resolve=False) if node else {}
        if "File" in declared_roles(options).get(name, ()):  # type: ignore[arg-type]
            OmegaConf.update(cfg, key, NOT_GIVEN)
    return preflight(cfg, ranks=ranks_of(args))


def ranks_of(args: PlanArgs) -> int:
    """Return the number of ranks that is planned for."""
    return int(os.environ.get("WORLD_SIZE", "1")) if args.ranks is None else args.ranks


COMMAND = Command(arguments=PlanArgs, run=plan, run_defaults={}, check=checked)
