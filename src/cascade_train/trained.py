"""A trained model, put together from what a run left, ready to paint.

Used by the verbs that look at results; training never comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig
from PIL import Image

from cascade_train.batch import sample_seed
from cascade_train.build.components import build_component, build_parts
from cascade_train.build.model import build_phases, build_whole_model
from cascade_train.build.run import write_exports
from cascade_train.build.samples import build_painter
from cascade_train.distributed.parallelize import evaluating
from cascade_train.distributed.process_group import World, process_group
from cascade_train.engine.checkpoint import CheckpointStore
from cascade_train.engine.manifest import find_fault
from cascade_train.engine.phase import restore_training_state
from cascade_train.engine.sampling import to_images
from cascade_train.errors import ConfigError, RunError
from cascade_train.tasks.base import Guide

Paint = Callable[[Sequence[str], Sequence[int], Guide | None], list[Image.Image]]
"""Maps captions, one image number each and, where images steer the samples, those to pictures.

A picture depends on its caption, number and image alone.
"""


def load_trained(cfg: DictConfig, export: Path, world: World, *, seed: int) -> Paint:
    """Build the run's model around its exported weights and return what paints with it. Collective.

    Args:
        cfg: the run's checked configuration; `cfg.sample` says how to sample.
        export: the run's `export/`.
        world: this process.
        seed: of the starting noise.

    Raises:
        ConfigError: the export is not of the configuration's model.
    """
    if build_component(cfg, "task").trains_network:
        cfg.model.weights = str(export)
    for key in {"weights", "backbone_weights"} & set(cfg.task):
        cfg.task[key] = None  # what they became lies in the export
    parts = build_parts(cfg)
    build_whole_model(cfg, parts, world)
    parts.task.load_export(export)
    painter = build_painter(cfg, parts)

    def paint(captions: Sequence[str], numbers: Sequence[int], guide: Guide | None) -> list[Image.Image]:
        def draws(_: str) -> list[torch.Generator]:
            return [torch.Generator().manual_seed(sample_seed(seed, 0, number, "generate")) for number in numbers]

        with evaluating([parts.stage.network]):
            return to_images(painter.paint(captions, None, draws, guide))

    return paint


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
