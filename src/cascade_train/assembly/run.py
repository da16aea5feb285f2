"""The composition root of a training: open data, claim the directory, build the trainer."""

from __future__ import annotations

import gc
import logging
from collections.abc import Container, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch.distributed.tensor import DTensor

from cascade_train.assembly.cache_identity import take_cache
from cascade_train.assembly.components import Parts, build_component, build_parts, families
from cascade_train.assembly.model import build_phases, own_sources, record_weights, weight_specs
from cascade_train.assembly.model_card import write_card
from cascade_train.assembly.planning.strategies import fit
from cascade_train.assembly.samples import build_sampling, build_validation, read_sample_prompts
from cascade_train.config.arguments import free_keys, make_absolute
from cascade_train.config.groups import chosen, typed_keys
from cascade_train.config.saved import recipe_of, to_plain
from cascade_train.data.cached import Cached
from cascade_train.data.data_set import DataSet, open_data_set
from cascade_train.data.loading.feed import Feed
from cascade_train.data.source import Source
from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.distributed.process_group import World, process_group
from cascade_train.distributed.rng import set_deterministic
from cascade_train.engine.checkpoint.folder import Retention, read_manifest
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.faults.bad_samples import UnreadableList
from cascade_train.engine.faults.stopping import Stopping, TimeLimit, code_of_stop
from cascade_train.engine.loop import Cadence, Trainer
from cascade_train.engine.loss_charts import LossCurve, LossPlot
from cascade_train.engine.metrics import MetricsLog
from cascade_train.engine.optimizer import Estimating
from cascade_train.engine.phase import BoundPhase, averaged, whole_state
from cascade_train.engine.profiler import Profiler
from cascade_train.engine.progress import Progress
from cascade_train.engine.run.directory import RunDirectory, claimed
from cascade_train.engine.run.report import write_report
from cascade_train.engine.tracking import build_tracker
from cascade_train.errors import ConfigError, RunError, is_lost_peer
from cascade_train.files.output import EXPORTER, remove_written
from cascade_train.files.run_folder import EXPORT, exported_step
from cascade_train.models.formats.weights_source import refuse_missing, weights_found_once
from cascade_train.redaction import redacted
from cascade_train.signals import Signals
from cascade_train.tasks.base import Task

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> int:
    """Run what `cfg` describes, to its end or an orderly stop; return the exit code. Collective.

    Raises:
        ConfigError: something the user can fix; a refused start leaves no run directory.
        RunError: a failure at run time.
        Interrupted: a signal during set-up, or one that was repeated.
    """
    with Signals() as signals, process_group() as world:
        set_deterministic(cfg.run.deterministic)
        make_absolute(cfg)
        read_sample_prompts(cfg)
        fit(cfg, world)
        parts = build_parts(cfg)
        if not gc.isenabled():  # in a process of its own (__main__): what it has imported stays
            gc.freeze()
            gc.enable()
        data = open_data(cfg, parts.task, world)
        data.check_sides(parts.stage.image_multiple)
        plain = to_plain(cfg)
        if isinstance(data.training.source, Cached):
            take_cache(plain, parts.stage, parts.task, data.training.source)
        with claimed(Path(cfg.run.dir), config=plain, resume=cfg.run.resume, free_keys=free_keys(plain)) as run:
            if not run.finished:
                return train_in(run, cfg, parts, data, world, signals)
        log.info("%s is finished. Raise train.max_steps to train on, or choose another run.name.", run.path)
        return 0


def train_in(
    run: RunDirectory,
    cfg: DictConfig,
    parts: Parts,
    data: DataSet,
    world: World,
    signals: Signals,
) -> int:
    """Train in a claimed directory to the exports or a stop; return the exit code. Collective."""
    with run.withdrawn_on_failure():
        if run.resume_from is None:  # a run that began so goes on
            data.check_batch(cfg.train.global_batch_size)
            refuse_missing(weight_specs(cfg, parts))  # before others are downloaded
        initial = ("task.weights", "task.backbone_weights", *(["model.weights"] if parts.task.trains_network else []))
        with weights_found_once():
            phases = build_phases(cfg, parts, world)
            specs, resumed = weight_specs(cfg, parts), run.resume_from is not None
            own = own_sources(to_plain(cfg))
            from_rank_zero(lambda: record_weights(run.path, specs, initial=initial, resumed=resumed, own=own))
        trainer = build_trainer(cfg, parts, phases, data, run, world, signals)
        if run.resume_from is not None:
            trainer.restore(run.resume_from)
        elif not run.created:
            trainer.tracker.rewind(0)
        average_doubts = check_averages(phases, trainer.step, trainer.max_steps)
        run.cut_metrics(trainer.step)
        run.record_stop(None)
        from_rank_zero(data.record)
        facts = start_facts(cfg, parts, data, run, trainer)
        run.record_start({"facts": facts, "data": cast(Feed, trainer.feed).report(), "overrides": overrides()})
    log.info("%s", "\n".join(f"  {name:<10} {text}" for name, text in facts.items()))
    estimates = any(isinstance(phase.optimizer, Estimating) for phase in phases)
    texts = [*doubts(cfg, trainer.max_steps, estimates=estimates), *average_doubts]
    for text in texts if world.is_main else ():
        log.warning("%s", text)
    signals.wait_for_votes()
    with ExitStack() as stack:
        if world.is_main:
            stack.callback(write_report, run.path, lambda: recipe_of(overrides(), to_plain(cfg)))
        try:
            trainer.run()
            if trainer.stopped is None:
                write_exports(cfg, parts.task, phases, run.export, run=run.path, step=trainer.step)
                run.record_exports(trainer.step)
                trainer.tracker.alert("Finished", f"{cfg.run.name} finished at step {trainer.step}.")
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) or is_lost_peer(error):
                trainer.store.abandon()
            trainer.tracker.alert("Failed", str(error) or type(error).__name__)
            raise
        finally:
            try:
                trainer.close()
            finally:
                data.close()
        if trainer.stopped is not None:
            run.record_stop({"step": trainer.step, "reason": trainer.stopped})
            return code_of_stop()
        log.info("Finished at step %d. Everything lies in %s.", trainer.step, run.path)
        return 0


def open_data(cfg: DictConfig, task: Task, world: World) -> DataSet:
    """Open the training and held-out samples; each rank reads or makes the same index. Collective."""
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


def build_trainer(
    cfg: DictConfig,
    parts: Parts,
    phases: list[BoundPhase],
    data: DataSet,
    run: RunDirectory,
    world: World,
    signals: Signals,
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
    cfg = in_steps(cfg, feed)
    limits = {key: cfg.train[key] for key in ("max_steps", "max_epochs", "global_batch_size")}
    facts = {} if run.resume_from is None else read_manifest(run.resume_from).facts
    seen = {key: facts[key] for key in ("step", "samples_seen") if facts}
    max_steps = data.last_step(feed, **limits, **seen, state=facts.get("data"))
    tracker = build_tracker(
        cfg.tracker.name.value,
        **{key: cfg.tracker[key] for key in ("project", "entity")},
        mode=cfg.tracker.mode.value,
        run_name=cfg.run.name,
        directory=run.path,
        run_id=None if run.created else facts.get("tracker_run_id"),  # a new directory is a tracked run of its own
        config=to_plain(cfg),
    )
    keys = ("keep_last", "keep_every_steps", "keep_best", "best_metric")
    retention = Retention(**{key: cfg.checkpoint[key] for key in keys}, best_mode=cfg.checkpoint.best_mode.value)
    return Trainer(
        world=world,
        task=parts.task,
        phases=phases,
        feed=feed,
        seed=cfg.run.seed,
        max_steps=max_steps,
        global_batch_size=cfg.train.global_batch_size,
        cadence=Cadence(**{name: cfg[name].every_steps for name in ("log", "validate", "sample", "checkpoint")}),
        metrics=MetricsLog(run.metrics_path, is_main=world.is_main),
        store=CheckpointStore(
            run.checkpoints, retention=retention, metrics=run.metrics_path, asynchronous=cfg.checkpoint.asynchronous
        ),
        tracker=tracker,
        progress=Progress(max_steps=max_steps, is_main=world.is_main, every_steps=cfg.log.every_steps),
        profiler=Profiler(directory=run.path, start_step=cfg.profile.start_step, steps=cfg.profile.steps),
        validation=build_validation(cfg, parts, phases, data, world),
        sampling=build_sampling(cfg, parts, phases, data, run, world),
        loss_plot=LossPlot(directory=run.samples, device=world.device, is_main=world.is_main),
        loss_curve=LossCurve(run.metrics_path, is_main=world.is_main),
        unreadable=UnreadableList(run.quarantine, rank=world.rank, met=feed.skipped),
        stopping=Stopping(signals=signals, limit=_time_limit(cfg), timeout_seconds=cfg.run.timeout_seconds),
        timeout_seconds=cfg.run.timeout_seconds if world.ranks > 1 else None,
    )


def _time_limit(cfg: DictConfig) -> TimeLimit:
    """Limit of a run whose cadences count steps; it remembers the last validation and the last samples."""
    between = [each.every_steps for each in (cfg.validate, cfg.sample) if each.every_steps is not None]
    return TimeLimit(max_hours=cfg.run.max_hours, remembered=max([TimeLimit.REMEMBERED, *between]) + 1)


def in_steps(cfg: DictConfig, feed: Feed) -> DictConfig:
    """A configuration whose cadences count steps instead of epochs."""
    cfg = cfg.copy()
    for node in (cfg.checkpoint, cfg.validate):
        if node.every_epochs is not None:
            node.every_steps = feed.steps_of_epochs(node.every_epochs)
    return cfg


def start_facts(cfg: DictConfig, parts: Parts, data: DataSet, run: RunDirectory, trainer: Trainer) -> dict[str, str]:
    """Device, parameters, samples, batch, length and folder of a run, for its log."""
    world = trainer.world
    micro = cfg.train.micro_batch_size
    accumulated = cfg.train.global_batch_size // (micro * world.ranks)
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    length = f"steps {trainer.step + 1} to {trainer.max_steps}" if trainer.step else f"{trainer.max_steps} steps"
    if trainer.step >= trainer.max_steps:
        length = f"no steps after step {trainer.step}"
    samples = "streamed, length unknown"
    if data.training.index.rows_are_samples:
        held_out = f", {len(data.held_out.rows):,} held out" if data.held_out is not None else ""
        samples = f"{len(data.training.rows):,}{held_out}"
        per_epoch = cast(Feed, trainer.feed).steps_of_epochs(1)
        length += f", {trainer.max_steps / per_epoch:.3g} epochs of {per_epoch} steps"
    return {
        "device": f"{world.ranks} x {device}, {_mode(cfg, world, trainer)}; {cfg.train.precision.value}",
        "trains": _trains(parts, trainer),
        "samples": samples,
        "batch": f"{cfg.train.global_batch_size} = {micro} per micro-batch x {accumulated} accumulated"
        f" x {world.ranks} rank{'s' if world.ranks > 1 else ''}",
        "length": length,
        "writes to": str(run.path),
    }


def doubts(cfg: DictConfig, max_steps: int, *, estimates: bool) -> list[str]:
    """Sentences on what may have been meant otherwise; `estimates`: whether the optimizer estimates its rate."""
    found, warmup, data = list[str](), cfg.lr_scheduler.get("warmup_steps") or 0, chosen("data", cfg.data["_target_"])
    if data == "data=shapes" and HydraConfig.initialized() and not {"data", "experiment", "debug"} & typed_keys():
        found.append(f"No data is chosen: training on {data}. Your own: data.path=…")
    if warmup + bool(cfg.lr_scheduler.get("from_zero")) > max_steps:
        found.append(f"lr_scheduler.warmup_steps={warmup}: the run ends before the learning rate reaches optimizer.lr.")
    if cfg.tracker.name.value == "none" and cfg.tracker.project is not None:
        found.append(f"tracker.project={cfg.tracker.project} has no effect with tracker=none.")
    if estimates and cfg.optimizer.lr < 0.1:
        found.append(f"optimizer.lr={cfg.optimizer.lr} is a factor on the step size that is estimated, usually 1.")
    return found


def check_averages(phases: Sequence[BoundPhase], step: int, max_steps: int) -> list[str]:
    """Warnings on averages of which the weights before the training will be a tenth or more at the last step.

    Raises:
        ConfigError: an average that would get no update, and be exported as it began.
    """
    averages = {p.ema: p.phase.start_step for p in phases if p.ema is not None and p.phase.start_step <= max_steps}
    found = []
    for ema, first in averages.items():
        updates = ema.updates_until(max_steps, after=step, first=first)
        if updates == 0:
            raise ConfigError(
                f"ema.start_step={ema.start_step}, ema.every_steps={ema.every_steps}: the average would get no update "
                f"in a run of {max_steps} steps. Lower both, so that one falls before the end, or set ema.decay=null."
            )
        if (share := ema.trained_share(updates)) < 0.9:
            found.append(
                f"ema.decay={ema.decay}: at the last step, after {updates} updates, {share:.2%} of the average comes "
                "from this training, the rest from the weights that it began with. The average is what is sampled and "
                "exported. Set a smaller ema.decay, or ema.ramp=true (without effect beside ema.weights); "
                "export weights=trained leaves it out."
            )
    return found


def _mode(cfg: DictConfig, world: World, trainer: Trainer) -> str:
    mode: str = cfg.parallel.mode.value
    if mode == "auto" and world.ranks == 1:
        mode = "single"
    elif mode == "auto":
        parameters = [p for phase in trainer.phases for p in phase.parameters.values()]
        split = any(isinstance(p, DTensor) and p.device_mesh.size(-1) > 1 for p in parameters)
        mode = "fsdp" if split else "ddp"
    return f"parallel={mode}"


def _trains(parts: Parts, trainer: Trainer) -> str:
    roots = [root for phase in trainer.phases for root in phase.roots]
    network = [] if "network" in parts.stage.left_out else [parts.stage.network]
    every = {id(p): p for p in chain.from_iterable(root.parameters() for root in [*roots, *network])}
    trained = sum(p.numel() for phase in trainer.phases for p in phase.parameters.values())
    added = parts.task.summary()
    return (
        f"{trained:,} of {sum(p.numel() for p in every.values()):,} parameters"
        f" ({type(parts.task).__name__} on {type(parts.stage).__name__}{f': {added}' if added else ''})"
    )


def write_exports(
    cfg: DictConfig,
    task: Task,
    phases: list[BoundPhase],
    directory: Path,
    *,
    run: Path,
    step: int,
    average: bool = True,
) -> None:
    """Write what the task leaves behind, each read back and compared. Collective.

    `average`: the averages of `ema`, where there are any, not the weights that train. A model card goes beside it, with
    the samples and metrics of a run up to a step.
    """
    exports = task.exports()
    with averaged(phases) if average else nullcontext():
        for name, export in exports.items():
            state = whole_state(export.module, frozen=export.whole)
            error = from_rank_zero(partial(export.write, state, directory / name))
            log.info("Exported %s; read back with a relative error of %.1e.", directory / name, error)

    def describe() -> None:
        OmegaConf.save(OmegaConf.create(redacted(to_plain(cfg))), directory / "config.yaml")
        write_card(directory, list(exports), source="", run=run, step=step)
        if directory.resolve() == (run / EXPORT).resolve() and exported_step(run) != step:
            _remove_conversions(directory, exports)

    from_rank_zero(describe)


def _remove_conversions(directory: Path, exports: Container[str]) -> None:
    """Remove what `cascade-train export` made of another step's exports."""
    names = {name for family in families() for name in family.uses if name not in exports}
    for path in (*(directory / name for name in names), *directory.glob("*.embeddings")):
        remove_written(path, EXPORTER)


def overrides() -> list[str]:
    """Overrides of this run's command line; none where Hydra did not start it."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
