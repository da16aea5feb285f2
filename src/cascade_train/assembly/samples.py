"""Sample grids, validation on held-out samples, and reconstructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from omegaconf import DictConfig

from cascade_train.assembly.components import Parts
from cascade_train.data.data_set import DataSet
from cascade_train.data.prompts import read_prompts
from cascade_train.distributed.process_group import World
from cascade_train.engine.phase import BoundPhase
from cascade_train.engine.run.directory import RunDirectory
from cascade_train.engine.sampling import SampleGrid, SampleSpec
from cascade_train.engine.validation import HeldOut, Reconstructions, SetDistance, Validation
from cascade_train.errors import ConfigError
from cascade_train.models.image_quality import (
    ReconstructionQuality,
    check_installed,
    frechet_distance,
    load_inception,
    load_lpips,
)
from cascade_train.tasks.base import ImageSampler, SampleSettings


def read_sample_prompts(cfg: DictConfig) -> None:
    """Replace the files that `sample.prompts` names by their prompts."""
    if cfg.sample.prompts is not None:
        cfg.sample.prompts = read_prompts(cfg.sample.prompts, key="sample.prompts")


def build_sampling(
    cfg: DictConfig, parts: Parts, phases: list[BoundPhase], data: DataSet, run: RunDirectory, world: World
) -> SampleGrid | None:
    """Grids of a run, or None where none are due."""
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
        image_sampler=build_image_sampler(cfg, parts, None if images is None else images.shape[-2:]),
        spec=SampleSpec(captions=tuple(prompts), image_BCHW=images, seed=cfg.sample.seed),
        world=world,
        directory=run.samples,
    )


def build_validation(
    cfg: DictConfig, parts: Parts, phases: list[BoundPhase], data: DataSet, world: World
) -> Validation | None:
    """Validation on held-out samples, or None where none is due."""
    if cfg.validate.every_steps is None:
        return None

    def held_out(samples: int) -> HeldOut:
        micro, ranks = cfg.train.micro_batch_size, {"rank": world.rank, "ranks": world.ranks}
        feed = data.held_out_feed(seed=cfg.run.seed, samples=samples, micro_batch_size=micro, **ranks)
        source = feed.source
        return HeldOut(open=feed.from_start, steps=feed.steps, parts=source.part_names, part_of=source.part_of)

    return Validation(
        task=parts.task,
        phases=phases,
        held_out=held_out(cfg.validate.samples),
        logsnr=list(cfg.validate.logsnr),
        device=world.device,
        reconstructions=build_reconstructions(cfg, parts, held_out, world.device),
    )


def build_reconstructions(
    cfg: DictConfig, parts: Parts, held_out: Callable[[int], HeldOut], device: torch.device
) -> Reconstructions | None:
    """Measure of reconstructions of held-out images, or None where none are due."""
    count, stage, lpips, rfid = cfg.validate.reconstructions, parts.stage, cfg.validate.lpips, cfg.validate.rfid
    if count == 0:
        return None
    if not stage.needs_image or (not stage.denoises and lpips is None and rfid is None):
        raise ConfigError(
            f"validate.reconstructions={count}: is for a Stage B, which reconstructs images from semantic latents, and "
            f"with validate.lpips or validate.rfid for a Stage A; not for this {stage.name}. Set "
            "validate.reconstructions=0."
        )
    check_installed()
    quality = ReconstructionQuality(
        multiple=stage.image_multiple if stage.denoises else None,
        lpips=None if lpips is None else load_lpips(lpips, device=device, key="validate.lpips"),
    )
    distance = None
    if rfid is not None:
        features = load_inception(rfid, device=device, key="validate.rfid")
        distance = SetDistance(features=features, distance=frechet_distance)
    image_sampler = partial(build_image_sampler, cfg, parts)
    return Reconstructions(held_out=held_out(count), image_sampler=image_sampler, compare=quality, rfid=distance)


def build_image_sampler(cfg: DictConfig, parts: Parts, size: Sequence[int] | None = None) -> ImageSampler:
    """Task's image sampler with the settings in `cfg.sample`; no size = square."""
    settings = SampleSettings(
        sampler=cfg.sample.sampler.value,
        steps=cfg.sample.steps,
        guidance_scale=cfg.sample.guidance_scale,
        shift=cfg.sample.shift,
        negative_prompt=cfg.sample.negative_prompt,
    )
    return parts.task.image_sampler(settings, size or (parts.stage.image_size, parts.stage.image_size))
