"""Compute memory, time and disk of a run before it begins.

    cascade-train plan experiment=finetune_c_3b ranks=8 device=h100

Needs no GPU, weights or network.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from cascade_train.assembly.planning.devices import DEVICES
from cascade_train.commands.parts.command_line import Command
from cascade_train.config.arguments import declared_roles
from cascade_train.config.preflight import preflight
from cascade_train.options import check_choice, limit

if TYPE_CHECKING:
    from cascade_train.assembly.planning.plan import Plan

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
        self.ranks = int(os.environ.get("WORLD_SIZE", "1")) if self.ranks is None else self.ranks
        check_choice("device", self.device, list(DEVICES))


def plan(args: PlanArgs, cfg: DictConfig) -> int:
    """Print the plan and return 0; raises as `planned`."""
    found = planned(args, cfg)
    print(json.dumps(dataclasses.asdict(found), indent=2) if args.json else found)
    return 0


def planned(args: PlanArgs, cfg: DictConfig) -> Plan:
    """Plan of a configuration from `checked`; a ConfigError where the run would be refused."""
    from cascade_train.assembly.planning.plan import make_plan  # heavy: torch and everything above it

    assert args.ranks is not None
    return make_plan(cfg, ranks=args.ranks, device=args.device, opens_data=args.samples)


def checked(args: PlanArgs, cfg: DictConfig) -> DictConfig:
    """A configuration as a training on `ranks` has it; files that it must name may be left out."""
    for key in sorted(OmegaConf.missing_keys(cfg)):
        node, _, name = key.rpartition(".")
        options = OmegaConf.to_container(OmegaConf.select(cfg, node), resolve=False) if node else {}
        if "File" in declared_roles(options).get(name, ()):  # type: ignore[arg-type]
            OmegaConf.update(cfg, key, NOT_GIVEN)
    return preflight(cfg, ranks=args.ranks)


COMMAND = Command(arguments=PlanArgs, run=plan, run_defaults={}, check=checked)
