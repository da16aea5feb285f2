"""A trained model, put together from what a run left.

Used by the verbs that look at results; training never comes here.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from cascade_train.assembly.components import Parts, build_component, build_parts
from cascade_train.assembly.model import build_phases, build_whole_model
from cascade_train.assembly.run import write_exports
from cascade_train.distributed.process_group import World, process_group
from cascade_train.engine.checkpoint.manifest import find_fault
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.phase import restore_training_state
from cascade_train.errors import ConfigError, RunError
from cascade_train.results.find import TrainedModel


def load_parts(model: TrainedModel, world: World) -> Parts:
    """Build a trained stage and its task around the weights that were exported. Collective.

    Raises:
        ConfigError: the export is not of the configuration's model.
    """
    cfg = model.cfg.copy()
    if model.export is not None:
        if build_component(cfg, "task").trains_network:
            cfg.model.weights = str(model.export)
        for key in {"weights", "backbone_weights"} & set(cfg.task):
            cfg.task[key] = None  # what they became lies in the export
    parts = build_parts(cfg)
    build_whole_model(cfg, parts, world)
    if model.export is not None:
        parts.task.load_export(model.export)
    return parts


def export_checkpoint(cfg: DictConfig, checkpoints: Path, *, step: int | None, out: Path) -> Path:
    """Load a checkpoint of a run, write the run's export from it, and return the checkpoint.

    Raises:
        ConfigError: no such checkpoint, or one of another model.
        RunError: the checkpoint asked for is damaged, or what was written reads back differently.
    """
    with process_group() as world:
        parts = build_parts(cfg)
        phases = build_phases(cfg, parts, world)
        store = CheckpointStore(checkpoints)
        path = store.newest(has_optimizer=False) if step is None else checkpoints / f"step_{step}"
        if path is None or not path.is_dir():
            there = ", ".join(map(str, store.steps())) or "none"
            raise ConfigError(
                f"from={checkpoints.parent}: no checkpoint{'' if step is None else f' of step {step}'}; steps that are "
                f"there: {there}."
            )
        if step is not None and (fault := find_fault(path)) is not None:
            raise RunError(f"from={checkpoints.parent}: the checkpoint of step {step} is damaged: {fault}.")
        restore_training_state(store, path, phases, parts.task, optimizer=False)
        write_exports(cfg, parts.task, phases, out)
    return path
