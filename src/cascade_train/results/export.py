"""Exports of trained models: of a run's checkpoint, and of several stages as one pipeline of diffusers.

What is written lives in models/formats/.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from cascade_train.assembly.components import build_component, build_parts
from cascade_train.assembly.model import build_phases
from cascade_train.assembly.run import write_exports
from cascade_train.diffusion.target import EpsilonTarget
from cascade_train.distributed.consensus import from_rank_zero
from cascade_train.distributed.process_group import World, process_group
from cascade_train.engine.checkpoint.folder import find_fault
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.phase import BoundPhase, restore_training_state
from cascade_train.engine.power_function import solve
from cascade_train.errors import ConfigError, RunError
from cascade_train.models.formats.export import DTYPES, build_plain_network
from cascade_train.models.formats.weights import load_state
from cascade_train.models.stage import Stage
from cascade_train.results.find import TrainedModel
from cascade_train.results.paint import Fingerprint, check_same_latents, fit_sizes, load_parts
from cascade_train.tasks.base import Task

log = logging.getLogger(__name__)

MOST_ERROR = 0.1
"""Largest difference of the profile of an average from what was asked for, relative to it, in the L2 norm."""


def export_checkpoint(
    cfg: DictConfig, checkpoints: Path, world: World, *, step: int | None, average: float | None = None, out: Path
) -> Path:
    """Load a checkpoint of a run, write the run's export from it, and return the checkpoint. Collective.

    `average` is the length of an average of the weights up to there that is exported, None = that of `ema`.

    Raises:
        ConfigError: no such checkpoint, one of another model, or no such average in those that are there.
        RunError: the checkpoint asked for is damaged, or what was written reads back differently.
    """
    if average is not None and cfg.ema.post_hoc is None:
        raise ConfigError(
            f"average={average}: the checkpoints of {checkpoints.parent} keep no averages to build it from. Train with "
            "ema.post_hoc=[0.05,0.1] checkpoint.keep_every_steps=<steps>, or leave average=null."
        )
    parts = build_parts(cfg)
    phases = build_phases(cfg, parts, world)
    store = CheckpointStore(checkpoints)

    def verified() -> Path:
        path = find_checkpoint(store, step)
        if step is not None and (fault := find_fault(path)) is not None:  # the newest is verified already
            raise RunError(f"from={checkpoints.parent}: the checkpoint of step {step} is damaged: {fault}.")
        return path

    path = from_rank_zero(verified)
    at = int(path.name.removeprefix("step_"))
    if average is None:
        restore_training_state(store, path, phases, parts.task, optimizer=False)
    else:
        restore_average(cfg, store, phases, parts.task, step=at, length=average)
    write_exports(cfg, parts.task, phases, out, run=checkpoints.parent, step=at)
    return path


def restore_average(
    cfg: DictConfig, store: CheckpointStore, phases: Sequence[BoundPhase], task: Task, *, step: int, length: float
) -> None:
    """Load the checkpoint of a step with an average of a length in the place of its weights. Collective.

    It is a sum of averages that checkpoints up to there keep (Karras et al. 2024, section 3.2).
    """
    lengths, every_steps = list(cfg.ema.post_hoc), cfg.ema.every_steps
    paths = {at: store.directory / f"step_{at}" for at in store.steps() if at <= step}
    steps = from_rank_zero(lambda: [at for at, path in paths.items() if find_fault(path) is None])
    by_update = {max(at - at % every_steps, every_steps): at for at in steps}  # some keep the same averages
    coefficients, error = solve([(at, each) for at in by_update for each in lengths], max(by_update), length)
    if error > MOST_ERROR:
        raise ConfigError(
            f"average={length} cannot be built from the averages of {lengths} in {len(by_update)} checkpoints up to "
            f"step {step}: the nearest differs by {error:.0%}, {MOST_ERROR:.0%} is the most. Choose a length nearer to "
            "those, or train with more checkpoints: checkpoint.keep_every_steps."
        )
    totals: list[dict[str, Tensor]] = [{} for _ in phases]
    for number, at in enumerate(by_update.values()):
        restore_training_state(store, paths[at], phases, task, optimizer=False)
        shares = coefficients[number * len(lengths) :][: len(lengths)]
        for phase, total in zip(phases, totals, strict=True):
            if phase.post_hoc is not None:
                phase.post_hoc.add_to(total, shares)
    for phase, total in zip(phases, totals, strict=True):
        if total:
            phase.replace_weights(total)
    log.info("The average %g is built from %d checkpoints; its profile differs by %.2g.", length, len(by_update), error)


def find_checkpoint(store: CheckpointStore, step: int | None) -> Path:
    """Return the folder of the checkpoint of a step, None = of the newest."""
    path = store.newest(has_optimizer=False) if step is None else store.directory / f"step_{step}"
    if path is None or not path.is_dir():
        there = ", ".join(map(str, store.steps())) or "none"
        raise ConfigError(
            f"from={store.directory.parent}: no checkpoint{'' if step is None else f' of step {step}'}; steps that are "
            f"there: {there}."
        )
    return path


def export_combined(model: TrainedModel, decoder: TrainedModel, *, dtype: str | None, out: Path) -> float:
    """Write Stage C and Stage B, with its Stage A, as one folder for diffusers' combined pipeline; return the error.

    `dtype` is a key of `DTYPES`, or None to keep that of the stored weights.

    Raises:
        ConfigError: adapters, stages that were not made for each other, or a Stage A that no pipeline has.
        RunError: what was written reads back differently.
    """
    _check(model, decoder)
    first: Any
    second: Any
    with process_group() as world:
        first, second = (load_parts(each, world).stage for each in (model, decoder))
    check_same_latents(model, Fingerprint.of(first), decoder, Fingerprint.of(second))
    states = [_stored(each, stage, dtype) for each, stage in ((model, first), (decoder, second))]
    error: float = first.save_combined(states[0], second, states[1], out)
    return error


def _check(model: TrainedModel, decoder: TrainedModel) -> None:
    fit_sizes(model, decoder, height=None, width=None, compression=None)  # stages in their places
    for each in (model, decoder):
        if not build_component(each.cfg, "task").trains_network:
            raise ConfigError(
                f"{each.origin}: a run of what is added to a network. Merge adapters into weights first, with "
                "cascade-train merge, and name those in the run's place."
            )
        target = build_component(each.cfg, "objective").target
        if not isinstance(target, EpsilonTarget):
            raise ConfigError(
                f"{each.origin}: was trained with objective.target={type(target).__name__}, and diffusers' pipelines "
                "of the cascade sample what predicts noise. Name one that was trained with objective=gdf."
            )
    codec = build_component(decoder.cfg, "model").stage_a
    if not codec.in_pipelines:
        raise ConfigError(
            f"{decoder.origin}: decodes by {type(codec).__name__}, which no pipeline of diffusers has. Name a Stage B "
            "on a VQGAN, such as one of model=b_tiny."
        )


def _stored(model: TrainedModel, stage: Stage, dtype: str | None) -> dict[str, Tensor]:
    """Return a stage's weights in the dtype that they are stored in."""
    source = model.cfg.model.weights if model.export is None else str(model.export)
    network = build_plain_network(stage.family, stage.network.config, None)
    key = model.origin.partition("=")[0]
    return load_state(network, source, dtype=DTYPES.get(dtype or ""), key=key, part=stage.part)
