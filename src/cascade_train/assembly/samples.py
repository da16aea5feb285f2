"""Sample grids: the task's painter with the settings in `cfg.sample`, and the prompts and images of every grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from omegaconf import DictConfig

from cascade_train.assembly.components import Parts
from cascade_train.data.data_set import DataSet
from cascade_train.data.prompts import read_prompts
from cascade_train.distributed.process_group import World
from cascade_train.engine.phase import BoundPhase
from cascade_train.engine.run.directory import RunDirectory
from cascade_train.engine.sampling import SampleGrid, SampleSpec
from cascade_train.errors import ConfigError
from cascade_train.tasks.base import Painter, SampleSettings


def read_sample_prompts(cfg: DictConfig) -> None:
    """Put the prompts of the files that `sample.prompts` names in their place; a ConfigError where that fails."""
    if cfg.sample.prompts is not None:
        cfg.sample.prompts = read_prompts(cfg.sample.prompts, key="sample.prompts")


def build_sampling(
    cfg: DictConfig, parts: Parts, phases: list[BoundPhase], data: DataSet, run: RunDirectory, world: World
) -> SampleGrid | None:
    """Return the grids of a run, or None where none are due."""
    if cfg.sample.every_steps is None:
        return None
    prompts, images = cfg.sample.prompts, None
    if prompts is None or parts.task.needs_image:
        batch = data.shown_batch(cfg.sample.count if prompts is None else len(prompts), seed=cfg.run.seed)
        prompts = batch.captions if prompts is None else prompts
        if batch.image_BCHW is not None:
            rows = torch.arange(len(prompts)) % len(batch)  # more prompts than pictures begin anew
            images = batch.image_BCHW[rows].float() / 255
    if parts.task.needs_image and images is None:
        raise ConfigError(
            f"sample.every_steps={cfg.sample.every_steps}: samples of this task follow pictures, and the data holds "
            "none but what was made of them; set sample.every_steps=null"
        )
    return SampleGrid(
        phases=phases,
        painter=build_painter(cfg, parts, None if images is None else images.shape[-2:]),
        spec=SampleSpec(captions=tuple(prompts), image_BCHW=images, seed=cfg.sample.seed),
        world=world,
        directory=run.samples,
    )


def build_painter(cfg: DictConfig, parts: Parts, size: Sequence[int] | None = None) -> Painter:
    """Return the task's painter with the settings in `cfg.sample`, for images of a height and width, or square ones."""
    settings = SampleSettings(
        sampler=cfg.sample.sampler.value,
        steps=cfg.sample.steps,
        guidance_scale=cfg.sample.guidance_scale,
        shift=cfg.sample.shift,
        negative_prompt=cfg.sample.negative_prompt,
    )
    return parts.task.painter(settings, size or (parts.stage.image_size, parts.stage.image_size))
