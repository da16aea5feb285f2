"""What a start is, in a few lines: device, parameters, samples, batch, length, folder."""

from __future__ import annotations

from itertools import chain
from typing import cast

import torch
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor

from cascade_train.assembly.components import Parts
from cascade_train.data.data_set import DataSet
from cascade_train.data.loading.feed import Feed
from cascade_train.distributed.process_group import World
from cascade_train.engine.loop import Trainer
from cascade_train.engine.run.directory import RunDirectory


def start_facts(cfg: DictConfig, parts: Parts, data: DataSet, run: RunDirectory, trainer: Trainer) -> dict[str, str]:
    """Return what device, parameters, samples, batch, length and folder of a run are. Not collective."""
    world = trainer.world
    micro = cfg.train.micro_batch_size
    accumulated = cfg.train.global_batch_size // (micro * world.ranks)
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    samples, length = _samples_and_length(data, trainer)
    return {
        "device": f"{world.ranks} x {device}, {_mode(cfg, world, trainer)}; {cfg.train.precision.value}",
        "trains": _trains(parts, trainer),
        "samples": samples,
        "batch": f"{cfg.train.global_batch_size} = {micro} per micro-batch x {accumulated} accumulated"
        f" x {world.ranks} rank{'s' if world.ranks > 1 else ''}",
        "length": length,
        "writes to": str(run.path),
    }


def _mode(cfg: DictConfig, world: World, trainer: Trainer) -> str:
    """Return how ranks share the work, decided where `auto` was given."""
    mode: str = cfg.parallel.mode.value
    if mode == "auto" and world.ranks == 1:
        mode = "single"
    elif mode == "auto":
        parameters = [p for phase in trainer.phases for p in phase.parameters.values()]
        split = any(isinstance(p, DTensor) and p.device_mesh.size(-1) > 1 for p in parameters)
        mode = "fsdp" if split else "ddp"
    return f"parallel={mode}"


def _trains(parts: Parts, trainer: Trainer) -> str:
    """Return how many parameters of the network and of what was added to it train."""
    roots = [root for phase in trainer.phases for root in phase.roots]
    network = [] if "network" in parts.stage.left_out else [parts.stage.network]
    every = {id(p): p for p in chain.from_iterable(root.parameters() for root in [*roots, *network])}
    trained = sum(p.numel() for phase in trainer.phases for p in phase.parameters.values())
    added = parts.task.summary()
    return (
        f"{trained:,} of {sum(p.numel() for p in every.values()):,} parameters"
        f" ({type(parts.task).__name__} on {type(parts.stage).__name__}{f': {added}' if added else ''})"
    )


def _samples_and_length(data: DataSet, trainer: Trainer) -> tuple[str, str]:
    """Return the number of samples and the length of the run."""
    steps = f"steps {trainer.step + 1} to {trainer.max_steps}" if trainer.step else f"{trainer.max_steps} steps"
    if not data.training.index.rows_are_samples:
        return "streamed, length unknown", steps
    held_out = f", {len(data.held_out.rows):,} held out" if data.held_out is not None else ""
    per_epoch = cast(Feed, trainer.feed).steps_of_epochs(1)
    epochs = f", {trainer.max_steps / per_epoch:.3g} epochs of {per_epoch} steps"
    return f"{len(data.training.rows):,}{held_out}", f"{steps}{epochs}"
