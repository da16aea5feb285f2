"""The components of a run from their config nodes.

How they are joined lives beside it; nothing below this room sees a config node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from cascade_train.assembly.build import build_node
from cascade_train.config.components import CONTRACTS, broken_contract
from cascade_train.config.groups import option_targets
from cascade_train.config.targets import class_constant
from cascade_train.engine.lr_schedule import LrSchedule
from cascade_train.engine.optimizer import OptimizerSpec
from cascade_train.errors import ConfigError
from cascade_train.models.family import Family
from cascade_train.models.stage import Stage
from cascade_train.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The components of a run, constructed but not built."""

    stage: Stage
    task: Task
    objective: Any
    optimizer: OptimizerSpec
    lr_schedule: LrSchedule


def build_parts(cfg: DictConfig) -> Parts:
    """Construct the components of a run; cheap, and where their arguments are checked.

    Raises:
        ConfigError: an argument that a component refuses, with the name of its node, or that means nothing for the
            stage.
    """
    stage, objective = build_component(cfg, "model"), build_component(cfg, "objective")
    task = build_component(cfg, "task").for_objective(objective)
    task.check_stage(stage)
    stage.left_out = task.unbuilt_parts()
    return Parts(
        stage=stage,
        task=task,
        objective=objective,
        optimizer=build_component(cfg, "optimizer"),
        lr_schedule=build_component(cfg, "lr_scheduler"),
    )


def build_component(cfg: DictConfig, node: str, **changed: Any) -> Any:
    """Construct one component node, `changed` instead of some of its arguments.

    Raises:
        ConfigError: an argument that it refuses, or something else than a component that a function made.
    """
    made = build_node(cfg[node], node, **changed)
    if reason := broken_contract(node, str(cfg[node]._target_), type(made), CONTRACTS[node]):
        raise ConfigError(reason)
    return made


def families() -> list[Family]:
    """Families of the models that `conf/model` names, in its order."""
    named = (class_constant(target, "family") for target in option_targets("model").values())
    return list(dict.fromkeys(family for family in named if family is not None))
