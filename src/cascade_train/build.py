"""The composition root: the only file that turns configuration into objects and joins them into a run.

What the objects do lives in their own files; nothing below this one sees a config node.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from cascade_train.cache_identity import take_cache
from cascade_train.config.explain import with_path
from cascade_train.config.paths import make_absolute
from cascade_train.config.plain import to_plain
from cascade_train.data.cached import Cached
from cascade_train.data.data_set import DataSet, open_data_set
from cascade_train.data.source import Source
from cascade_train.diffusion.objective import Objective
from cascade_train.diffusion.sampler import ImageNoise, sample
from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.distributed.parallelize import fits_one_device, parallelize
from cascade_train.distributed.process_group import World, build_mesh, mesh_shape, process_group
from cascade_train.distributed.rng import set_deterministic
from cascade_train.engine.checkpoint import CheckpointStore
from cascade_train.engine.ema import Ema
from cascade_train.engine.loop import Cadence, Trainer
from cascade_train.engine.loss_plot import LossPlot
from cascade_train.engine.lr_schedule import LrSchedule
from cascade_train.engine.manifest import read_manifest
from cascade_train.engine.metrics import MetricsLog
from cascade_train.engine.optimizer import OptimizerSpec
from cascade_train.engine.phase import BoundPhase, averaged, trainable_parameters, whole_state
from cascade_train.engine.profiler import Profiler
from cascade_train.engine.progress import Progress
from cascade_train.engine.run_directory import RunDirectory, claim
from cascade_train.engine.sampling import Painter, SampleGrid, SampleSpec
from cascade_train.engine.tracking import build_tracker
from cascade_train.engine.unreadable import UnreadableList
from cascade_train.engine.validation import Validation
from cascade_train.errors import ConfigError, RunError
from cascade_train.models.stage import Stage
from cascade_train.tasks.base import Phase, Predictor, Task

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The components of a run, constructed but not built."""

    stage: Stage
    task: Task
    objective: Objective
    optimizer: OptimizerSpec
    lr_schedule: LrSchedule


def train(cfg: DictConfig) -> int:
    """Run what `cfg` describes, to its end; return the exit code. Collective.

    Raises:
        ConfigError: something the user can fix; a refused start leaves no run directory.
        RunError: something the world did.
    """
    with process_group() as world:
        set_deterministic(cfg.run.deterministic)
        for node in (cfg.model, cfg.task, cfg.ema):
            make_absolute(node)
        parts = build_parts(cfg)
        data = open_data(cfg, parts.task, world)
        data.check_sides(parts.stage.image_multiple)
        if isinstance(data.training.source, Cached):
            take_cache(to_plain(cfg), parts.stage, parts.task, data.training.source)
        run = claim(Path(cfg.run.dir), config=to_plain(cfg), resume=cfg.run.resume)
        with run.held():
            if run.finished:
                log.info("%s is finished. Raise train.max_steps to train on, or choose another run.name.", run.path)
            else:
                train_in(run, cfg, parts, data, world)
    return 0


def train_in(run: RunDirectory, cfg: DictConfig, parts: Parts, data: DataSet, world: World) -> None:
    """Train in a claimed directory, to the end and the exports. Collective."""
    with run.withdrawn_on_failure():
        phases = build_phases(cfg, parts, world)
        trainer = build_trainer(cfg, parts, phases, data, run, world)
        if run.resume_from is not None:
            trainer.restore(run.resume_from)
        run.cut_metrics(trainer.step)
        from_rank_zero(data.record)
    try:
        trainer.run()
        write_exports(cfg, parts.task, phases, run.export)
        run.record_exports(trainer.step)
    finally:
        trainer.close()
        data.close()
    log.info("Finished at step %d. Everything lies in %s.", trainer.step, run.path)


def build_parts(cfg: DictConfig) -> Parts:
    """Construct the components of a run; cheap, and where their arguments are checked.

    Raises:
        ConfigError: an argument that a component refuses, with the name of its node.
    """
    return Parts(
        stage=build_component(cfg, "model"),
        task=build_component(cfg, "task"),
        objective=build_component(cfg, "objective"),
        optimizer=build_component(cfg, "optimizer"),
        lr_schedule=build_component(cfg, "lr_scheduler"),
    )


def build_component(cfg: DictConfig, node: str, **changed: Any) -> Any:
    """Construct one component node, `changed` in the place of some of its arguments.

    Raises:
        ConfigError: the component refuses an argument.
    """
    try:
        return instantiate(cfg[node], **changed, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from error
        if isinstance(cause, ValueError):
            raise ConfigError(with_path(error, node)) from error
        raise


def open_data(cfg: DictConfig, task: Task, world: World) -> DataSet:
    """Open the training and held-out samples; each rank reads or makes the same index. Collective.

    Raises:
        ConfigError: the data is missing or not of its source's form.
        RunError: ranks see different data.
    """
    source: Source = build_component(cfg, "data")
    held_out: Source | None = None
    if cfg.validate.urls is not None:
        held_out = build_component(cfg, "data", urls=list(cfg.validate.urls))
    opened: list[DataSet] = []
    transform = task.sample_transform()

    def open_all() -> str:
        opened.append(open_data_set(source, share=cfg.validate.share, held_out=held_out, transform=transform))
        return opened[0].identity

    if len(set(from_every_rank(open_all))) > 1:
        raise RunError("the ranks see different data: files changed while the run began; start it again", shared=True)
    return opened[0]


def compute_dtype(cfg: DictConfig) -> torch.dtype:
    """Return the dtype of compute and of frozen weights; preflight has decided what `auto` means."""
    return DTYPES[cfg.train.precision.value]


def build_model(cfg: DictConfig, parts: Parts, world: World, *, masters: bool) -> None:
    """Build the stage and let the task take it. Collective.

    Args:
        cfg: the root config.
        parts: whose stage and task.
        world: this process.
        masters: keep a network that trains in fp32; False = in the dtype of compute, to look at results.

    Raises:
        ConfigError: weights that do not exist or fit, or a task that does not fit the stage.
    """
    dtype = compute_dtype(cfg)
    network_dtype = torch.float32 if masters and parts.task.trains_network else dtype

    def build() -> None:
        parts.stage.build(device=world.device, network_dtype=network_dtype, frozen_dtype=dtype)
        parts.task.attach(parts.stage, parts.objective, world.device)
        parts.stage.set_attention(cfg.attention.value)
        parts.stage.set_activation_checkpointing(cfg.activation_checkpointing)

    from_every_rank(build)


def build_phases(cfg: DictConfig, parts: Parts, world: World) -> list[BoundPhase]:
    """Build the model, shard what trains, and bind each phase to its optimizer. Collective."""
    build_model(cfg, parts, world, masters=True)
    if world.is_main and cfg.model.weights is None and not parts.task.trains_network:
        log.warning(
            "model.weights=null: the network has its first values, and its last layer begins at zero, so that nothing "
            "in front of it can learn. Name trained weights, unless you only try a machine."
        )
    phases = parts.task.phases()
    roots = [root for phase in phases for root in phase.modules.values()]
    fits = all(from_every_rank(lambda: fits_one_device(roots, world.device)))
    shape = mesh_shape(cfg.parallel.mode.value, world.ranks, shard_size=cfg.parallel.shard_size, fits=fits)
    mesh = build_mesh(world, shape)
    for phase in phases:
        for name, root in phase.modules.items():
            parallelize(
                root,
                phase.units[name],
                mesh=mesh,
                compute_dtype=compute_dtype(cfg),
                reshard_after_forward=cfg.parallel.reshard_after_forward,
                compile_units=cfg.compile.value == "regional",
            )
    return [bind(cfg, phase, parts) for phase in phases]


def bind(cfg: DictConfig, phase: Phase, parts: Parts) -> BoundPhase:
    """Give a sharded phase its optimizer, schedule and average."""
    parameters = trainable_parameters(phase)
    spec: OptimizerSpec = phase.optimizer or parts.optimizer
    ema = None
    if cfg.ema.decay is not None:
        ema = Ema(
            parameters,
            decay=cfg.ema.decay,
            start_step=cfg.ema.start_step,
            every_steps=cfg.ema.every_steps,
            device=None if cfg.ema.device is None else torch.device(cfg.ema.device.value),
        )
        if cfg.ema.weights is not None:
            from_every_rank(partial(ema.start_from, parts.task.initial_average(cfg.ema.weights)))
    return BoundPhase(
        phase,
        optimizer=spec.build(parameters, cfg.train.global_batch_size),
        base_lr=spec.base_lr(cfg.train.global_batch_size),
        lr_schedule=parts.lr_schedule,
        ema=ema,
        max_grad_norm=cfg.train.max_grad_norm,
    )


def build_trainer(
    cfg: DictConfig, parts: Parts, phases: list[BoundPhase], data: DataSet, run: RunDirectory, world: World
) -> Trainer:
    """Join the built parts of a run. Collective."""
    feed = data.training_feed(
        seed=cfg.run.seed,
        global_batch_size=cfg.train.global_batch_size,
        micro_batch_size=cfg.train.micro_batch_size,
        rank=world.rank,
        ranks=world.ranks,
        gather=lambda value: from_every_rank(lambda: value),
    )
    limits = {key: cfg.train[key] for key in ("max_steps", "max_epochs", "global_batch_size")}
    max_steps = data.last_step(feed, **limits)
    tracker = build_tracker(
        cfg.tracker.name.value,
        project=cfg.tracker.project,
        entity=cfg.tracker.entity,
        mode=cfg.tracker.mode.value,
        run_name=cfg.run.name,
        directory=run.path,
        run_id=tracker_run_id(run),
        config=to_plain(cfg),
    )
    return Trainer(
        world=world,
        task=parts.task,
        phases=phases,
        feed=feed,
        seed=cfg.run.seed,
        max_steps=max_steps,
        global_batch_size=cfg.train.global_batch_size,
        cadence=Cadence(
            log=cfg.log.every_steps,
            validate=cfg.validate.every_steps,
            sample=cfg.sample.every_steps,
            checkpoint=cfg.checkpoint.every_steps,
        ),
        metrics=MetricsLog(run.metrics_path, is_main=world.is_main),
        store=CheckpointStore(
            run.checkpoints, keep_last=cfg.checkpoint.keep_last, keep_every_steps=cfg.checkpoint.keep_every_steps
        ),
        tracker=tracker,
        progress=Progress(max_steps=max_steps, is_main=world.is_main, every_steps=cfg.log.every_steps),
        profiler=Profiler(directory=run.path, start_step=cfg.profile.start_step, steps=cfg.profile.steps),
        validation=build_validation(cfg, parts, phases, data, world),
        sampling=build_sampling(cfg, parts, phases, data, run, world),
        loss_plot=LossPlot(directory=run.samples, device=world.device, is_main=world.is_main),
        unreadable=UnreadableList(run.quarantine, rank=world.rank, met=feed.skipped),
    )


def tracker_run_id(run: RunDirectory) -> str | None:
    """Return the tracked run to continue: that of this very run's checkpoint."""
    if run.created or run.resume_from is None:
        return None
    return read_manifest(run.resume_from).facts["tracker_run_id"]


def build_validation(
    cfg: DictConfig, parts: Parts, phases: list[BoundPhase], data: DataSet, world: World
) -> Validation | None:
    """Return the measure on held-out samples, or None where none are due."""
    if cfg.validate.every_steps is None:
        return None
    feed = data.held_out_feed(
        seed=cfg.run.seed,
        samples=cfg.validate.samples,
        micro_batch_size=cfg.train.micro_batch_size,
        rank=world.rank,
        ranks=world.ranks,
    )
    return Validation(
        task=parts.task,
        phases=phases,
        open_feed=feed.from_start,
        steps=feed.steps,
        logsnr=list(cfg.validate.logsnr),
        device=world.device,
    )


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


def write_exports(cfg: DictConfig, task: Task, phases: list[BoundPhase], directory: Path) -> None:
    """Write what the task leaves behind, the average where there is one, each read back and compared. Collective.

    Raises:
        RunError: what was written reads back differently.
    """
    with averaged(phases):
        for name, export in task.exports().items():
            state = whole_state(export.module)
            error = from_rank_zero(partial(export.write, state, directory / name))
            log.info("Exported %s; read back with a relative error of %.1e.", directory / name, error)
    from_rank_zero(lambda: OmegaConf.save(OmegaConf.create(to_plain(cfg)), directory / "config.yaml"))
