"""What draws samples, bound to a stage, an objective and the settings in `cfg.sample`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig

from cascade_train.build.components import Parts
from cascade_train.data.data_set import DataSet
from cascade_train.diffusion.sampler import ImageNoise, sample
from cascade_train.distributed.process_group import World
from cascade_train.engine.phase import BoundPhase
from cascade_train.engine.run_directory import RunDirectory
from cascade_train.engine.sampling import Painter, SampleGrid, SampleSpec
from cascade_train.errors import ConfigError
from cascade_train.tasks.base import Predictor


def build_sampling(
    cfg: DictConfig, parts: Parts, phases: list[BoundPhase], data: DataSet, run: RunDirectory, world: World
) -> SampleGrid | None:
    """Return what draws the grids, or None where none are due."""
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
        task=parts.task,
        phases=phases,
        painter=build_painter(cfg, parts, world.device, size=None if images is None else images.shape[-2:]),
        spec=SampleSpec(captions=tuple(prompts), image_BCHW=images, seed=cfg.sample.seed),
        world=world,
        directory=run.samples,
    )


def build_painter(cfg: DictConfig, parts: Parts, device: torch.device, *, size: Sequence[int] | None = None) -> Painter:
    """Bind a stage and an objective to the settings in `cfg.sample`, for pictures of a height and width, or square."""
    stage, objective = parts.stage, parts.objective
    shape = stage.latent_shape(*(size or (stage.image_size, stage.image_size)))

    def one_step(predictor: Predictor, x0_BCHW: torch.Tensor, noise_BCHW: torch.Tensor) -> torch.Tensor:
        diffused = objective.diffuse_at(x0_BCHW, noise_BCHW, x0_BCHW.new_zeros(len(x0_BCHW)))
        pred, _ = predictor(diffused.noised, diffused.timestep_ratio_B)
        return objective.x0(pred, diffused.noised, diffused.logsnr_B)

    def paint(predictor: Predictor, generators: Any) -> torch.Tensor:
        return sample(
            predictor,
            objective=objective,
            noise=ImageNoise(generators=generators, shape=shape, device=device),
            steps=cfg.sample.steps,
            shift=cfg.sample.shift,
            guidance_scale=cfg.sample.guidance_scale,
            sampler=cfg.sample.sampler.value,
        )

    return Painter(encode=stage.encode, decode=stage.decode, one_step=one_step, sample=paint)
