"""Exports of trained models: of a run's checkpoint, and of several stages as one pipeline of diffusers.

What is written lives in models/formats/.
"""

from __future__ import annotations

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
from cascade_train.engine.phase import restore_training_state
from cascade_train.errors import ConfigError, RunError
from cascade_train.models.formats.export import DTYPES, build_plain_network
from cascade_train.models.formats.weights import load_state
from cascade_train.models.stage import Stage
from cascade_train.results.find import TrainedModel
from cascade_train.results.paint import Fingerprint, check_same_latents, fit_sizes, load_parts


def export_checkpoint(cfg: DictConfig, checkpoints: Path, world: World, *, step: int | None, out: Path) -> Path:
    """Load a checkpoint of a run, write the run's export from it, and return the checkpoint. Collective.

    Raises:
        ConfigError: no such checkpoint, or one of another model.
        RunError: the checkpoint asked for is damaged, or what was written reads back differently.
    """
    parts = build_parts(cfg)
    phases = build_phases(cfg, parts, world)
    store = CheckpointStore(checkpoints)

    def verified() -> Path:
        path = find_checkpoint(store, step)
        if step is not None and (fault := find_fault(path)) is not None:  # the newest is verified already
            raise RunError(f"from={checkpoints.parent}: the checkpoint of step {step} is damaged: {fault}.")
        return path

    path = from_rank_zero(verified)
    restore_training_state(store, path, phases, parts.task, optimizer=False)
    at = int(path.name.removeprefix("step_"))
    write_exports(cfg, parts.task, phases, out, run=checkpoints.parent, step=at)
    return path


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
