"""Components from their config nodes: the only file that instantiates.

How they are joined lives beside it; nothing below this room sees a config node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from cascade_train.config.error_messages import with_path
from cascade_train.config.hydra_compat import construct
from cascade_train.config.static.contracts import check_class, check_imported
from cascade_train.errors import ConfigError

if TYPE_CHECKING:
    from cascade_train.engine.lr_schedule import LrSchedule
    from cascade_train.engine.optimizer import OptimizerSpec
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
        ConfigError: an argument that a component refuses, with the name of its node.
    """
    stage, objective = build_component(cfg, "model"), build_component(cfg, "objective")
    task = build_component(cfg, "task").for_objective(objective)
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
        ConfigError: a class that cannot be imported or does not keep its contract, or that refuses an argument.
    """
    check_imported(node, OmegaConf.to_container(cfg[node]), changed)
    try:
        made = construct(cfg[node], **changed)
        check_class(node, str(cfg[node]._target_), type(made))
        return made
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from error
        if isinstance(cause, ValueError):
            raise ConfigError(with_path(error, node)) from error
        raise
