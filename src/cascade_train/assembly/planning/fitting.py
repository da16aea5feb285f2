"""Choose the micro-batch size and settings that save memory by computed peaks; log the computed peak of a start.

Lives here: the choice. Must not live here: how memory is computed (memory.py).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING, DictConfig, OmegaConf

from cascade_train.assembly.components import build_parts
from cascade_train.assembly.planning.devices import CONTEXT_BYTES, Budget, as_gb, free_host_bytes
from cascade_train.assembly.planning.memory import Memory, memory_of, over_ranks
from cascade_train.assembly.planning.rehearsal import Rehearsed, unloaded
from cascade_train.config.groups import typed_keys
from cascade_train.config.saved import CONFIG_NAME
from cascade_train.config.targets import class_constant
from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.distributed.process_group import World
from cascade_train.errors import LESS_MEMORY, ConfigError
from cascade_train.files.untrusted import read_mapping
from cascade_train.options import AUTO

log = logging.getLogger(__name__)

ENOUGH = 4
"""Micro-batch size from which on a GPU is busy. Assumed, not measured."""

TIERS_GB = (16, 24, 48, 80)
"""Options of `memory`."""

BOUND = ("optimizer.algorithm", "train.master_weights", "train.base_weights")
"""Keys that a choice sets and on which the checkpoints of a run depend."""

CHOSEN = ("ema.device", "activation_checkpointing", "parallel.cpu_offload", "checkpoint.asynchronous", *BOUND)
"""Keys that a choice sets, beside the micro-batch size."""

Values = dict[str, Any]
"""Values of the configuration, by key."""


def free_gb(device: torch.device, machine_ranks: int) -> tuple[float, float]:
    """Return a rank's free GB on its device, and on its host beside a GPU."""
    host = free_host_bytes() / machine_ranks / 1e9
    if device.type != "cuda":
        return host, math.inf
    free, whole = torch.cuda.mem_get_info(device)
    return min(whole, free + CONTEXT_BYTES) / 1e9, host


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The values that a choice sets, the micro-batch size, and bytes of a rank's computed peak with them.

    `fits` says whether the peak fits the device or the budget, and the rest the host; `whole` is the memory of a rank
    that has all weights, `layout` that of a rank of the run, `steps` are the rehearsed ones.
    """

    values: Values
    micro_batch_size: int
    bytes: int
    fits: bool
    whole: Memory
    layout: Memory
    steps: Rehearsed


def fit(cfg: DictConfig, world: World) -> None:
    """Choose what `memory` and the micro-batch leave open, in place, and log the computed peak. Collective.

    Nothing is loaded or written, and no start is refused for a computed peak. On a CPU only a choice computes it.

    Raises:
        ConfigError: a choice is asked for, and the memory of the run cannot be computed.
    """
    here = from_every_rank(partial(free_gb, world.device, world.machine_ranks))
    gb, host_gb = (min(each) for each in zip(*here, strict=True))
    on_cuda = world.device.type == "cuda"
    ranks = {"ranks": world.ranks, "machine_ranks": world.machine_ranks}
    budget = Budget(gb=gb, on_cuda=on_cuda, host_gb=host_gb, kept=typed_keys(), **ranks)
    if on_cuda or is_asked(cfg):
        change(cfg, from_rank_zero(partial(choose_or_skip, cfg, budget)))


def is_asked(cfg: DictConfig) -> bool:
    """Return whether the configuration asks for a choice."""
    return cfg.train.micro_batch_size == AUTO or cfg.memory.budget_gb is not None


def choose_or_skip(cfg: DictConfig, budget: Budget) -> Values:
    """Return what to set, and log it; nothing where no step can be rehearsed."""
    try:
        return decide(cfg, budget)
    except ConfigError:
        raise
    except Exception as error:  # a class of the user's own may need the values of tensors
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if is_asked(cfg):
            raise ConfigError(
                f"The memory of this training cannot be computed beforehand ({reason}). Set train.micro_batch_size to "
                "a number, and memory=none."
            ) from error
        log.info("The memory of this training is not computed beforehand (%s).", reason)
        return {}


def decide(cfg: DictConfig, budget: Budget) -> Values:
    """Return what to set, and log it; a continued run keeps its values while they fit."""
    bound, earlier = saved_settings(cfg, budget)
    stays, budget = changed(cfg, bound), dataclasses.replace(budget, kept={*budget.kept, *bound})
    choice = choose(changed(stays, {**earlier, "memory.budget_gb": None}), budget) if earlier else None
    if choice is None or choice.bytes > budget.gb * 1e9:
        choice, earlier = choose(stays, budget), {}
    values = {**bound, **earlier, **choice.values, "train.micro_batch_size": choice.micro_batch_size}
    asked, here = cfg.memory.budget_gb, f"{as_gb(budget.gb * 1e9)} GB{'' if budget.on_cuda else ' free on this host'}"
    of = here if asked in (None, AUTO) else f"memory.budget_gb={asked}, here are {here}"
    need, micro = as_gb(choice.bytes), choice.micro_batch_size
    source = "computed from the run's own step, not measured"
    log.info("micro_batch_size=%d: %s GB by its computed peak, of %s (%s)", micro, need, of, source)
    if asked is not None:
        new = {key: value for key, value in values.items() if key in CHOSEN and OmegaConf.select(cfg, key) != value}
        log.info("memory.budget_gb=%s chose %s", asked, names_of(new))
    if is_asked(cfg) and not choice.fits:
        log.warning("%s", nothing_fits(cfg, choice, budget))
    elif choice.bytes > budget.gb * 1e9:
        rule = "This run needs %s GB by its computed peak, and each rank has %s, at train.micro_batch_size=%d: %s."
        log.warning(rule, need, here, micro, remedy(cfg, budget))
    return values


def choose(cfg: DictConfig, budget: Budget) -> Choice:
    """Return the largest micro-batch size, and the cheapest savings, with which a training fits.

    Savings that leave its numbers as they are may be added for a micro-batch size of `ENOUGH`; others only where
    nothing else fits. Where nothing fits at all, what needs least. A configuration that leaves nothing open comes back
    as it is.
    """
    micro, share = cfg.train.micro_batch_size, cfg.train.global_batch_size // budget.ranks
    sizes = divisors(share) if _is_size_open(cfg, budget) else [micro]
    values: Values = {}
    tried: list[Choice] = []
    for saving in [{}, *_free(exact_savings(cfg, budget), cfg, budget)]:
        choice = _computed(cfg, {**values, **saving}, budget, sizes)
        if saving and not _host_takes(choice.layout, budget):
            continue
        values = choice.values
        tried.append(choice)
        if choice.fits and choice.micro_batch_size >= min(ENOUGH, sizes[-1]):
            return choice
    if fitting := [choice for choice in tried if choice.fits]:
        return fitting[0]
    rounded = dict(values)
    for saving in _free(rounding_savings(cfg), cfg, budget):
        rounded |= saving
        tried.append(_computed(cfg, rounded, budget, sizes))
        if tried[-1].fits:
            return tried[-1]
    for saving in _free(offloading(cfg, budget), cfg, budget):
        choice = _computed(cfg, {**values, **saving}, budget, sizes)
        tried += [choice] if _host_takes(choice.layout, budget) else []
    return min(tried, key=lambda choice: choice.bytes)


def divisors(count: int) -> list[int]:
    """Return the numbers that divide another, the smallest first."""
    return [size for size in range(1, count + 1) if count % size == 0]


def _is_size_open(cfg: DictConfig, budget: Budget) -> bool:
    micro = cfg.train.micro_batch_size
    return micro == AUTO or (cfg.memory.budget_gb is not None and "train.micro_batch_size" not in budget.kept)


def _free(savings: Iterator[Values], cfg: DictConfig, budget: Budget) -> list[Values]:
    is_asked = cfg.memory.budget_gb is not None
    return [saving for saving in savings if is_asked and all(is_free(key, budget.kept) for key in saving)]


def _computed(cfg: DictConfig, values: Values, budget: Budget, sizes: Sequence[int]) -> Choice:
    """Return the largest micro-batch size that fits with some values, else the smallest."""
    trial, share = changed(cfg, values), cfg.train.global_batch_size // budget.ranks
    whole, steps = memory_of(trial, on_cuda=budget.on_cuda)
    has_gb = budget.gb if budget.on_cuda else math.inf  # the device decides the mode, not what is asked for
    layout = over_ranks(trial, whole, budget.ranks, machine_ranks=budget.machine_ranks, device_gb=has_gb)
    limit = budget.usable_bytes(cfg.memory.budget_gb)
    size = layout.largest(limit, sizes, share) or sizes[0]
    need = layout.total(size, share // size)
    fits = need <= limit and _host_takes(layout, budget)
    return Choice(values=values, micro_batch_size=size, bytes=need, fits=fits, whole=whole, layout=layout, steps=steps)


def _host_takes(layout: Memory, budget: Budget) -> bool:
    """Return whether what lies on the host fits there beside copies for saves, which alone decide nothing."""
    return not layout.on_host or layout.host_bytes() <= budget.host_bytes


def exact_savings(cfg: DictConfig, budget: Budget) -> Iterator[Values]:
    """Yield savings that leave a run's numbers as they are, the cheapest first."""
    averages = cfg.ema.decay is not None or cfg.ema.post_hoc is not None
    if budget.on_cuda and averages and cfg.ema.device is None:
        yield {"ema.device": "cpu"}
    if not cfg.activation_checkpointing and _builds_network(cfg):
        yield {"activation_checkpointing": True}


def rounding_savings(cfg: DictConfig) -> Iterator[Values]:
    """Yield what changes a run's numbers a little: each is added to those before."""
    trains = class_constant(cfg.task._target_, "trains_network")
    if not trains and cfg.train.base_weights is None and not cfg.task.get("dora") and _builds_network(cfg):
        yield {"train.base_weights": "int8"}
    if algorithm := _of_8_bits(cfg.optimizer):
        yield {"optimizer.algorithm": algorithm}
    if (cfg.train.precision, cfg.train.master_weights) == ("bf16", "fp32"):
        parts = build_parts(unloaded(cfg))
        if parts.task.trains_network and parts.optimizer.rounds():
            yield {"train.master_weights": "bf16"}


def offloading(cfg: DictConfig, budget: Budget) -> Iterator[Values]:
    """Yield weights and optimizer on the host, unless the algorithm refuses that; then without copies for saves."""
    target = (cfg.optimizer.get("algorithm") or {}).get("_target_")
    needs_whole = bool(target and class_constant(target, "needs_whole"))
    if budget.on_cuda and not needs_whole and not cfg.parallel.cpu_offload:
        yield {"parallel.cpu_offload": True}
        if cfg.checkpoint.asynchronous:
            yield {"parallel.cpu_offload": True, "checkpoint.asynchronous": False}


def _builds_network(cfg: DictConfig) -> bool:
    """Return whether the run has the stage's network, which checkpointing recomputes."""
    return "network" not in build_parts(unloaded(cfg)).stage.left_out


def _of_8_bits(optimizer: DictConfig) -> Values | None:
    """Return AdamW with moments of 8 bits in the place of torch's; None for other algorithms."""
    algorithm: Mapping[Any, Any] = optimizer.get("algorithm") or {}
    is_plain = algorithm.get("_target_") == "torch.optim.AdamW" and not algorithm.get("amsgrad")
    if not is_plain or not {"betas", "eps"} <= set(algorithm):
        return None
    settings = {"betas": list(algorithm["betas"]), "eps": algorithm["eps"], "block_size": 64}
    target = "cascade_train.engine.algorithms.adamw_8bit.AdamW8bit"
    return {"_target_": target, "_partial_": True, **settings}


def is_free(key: str, kept: Collection[str]) -> bool:
    """Return whether the user set neither a key nor something in it, nor, of an optimizer, its group."""
    blocking = {key, "optimizer"} if key.startswith("optimizer") else {key}
    return not any(typed in blocking or typed.startswith(f"{key}.") for typed in kept)


def names_of(values: Values) -> str:
    """Return values as keys are set."""
    return " ".join(_setting(key, value) for key, value in values.items()) or "nothing more"


def _setting(key: str, value: Any) -> str:
    if key == "optimizer.algorithm":
        return "optimizer=adamw_8bit"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def remedy(cfg: DictConfig, budget: Budget) -> str:
    """Return what makes a run fit: a micro-batch size, memory=auto, or what to try."""
    for asked in (None, AUTO):
        found = choose(changed(cfg, {"train.micro_batch_size": AUTO, "memory.budget_gb": asked}), budget)
        if found.fits:
            size = f"train.micro_batch_size={found.micro_batch_size}"
            return f"{size} fits" if asked is None else f"memory=auto fits, by {names_of(found.values)} at {size}"
    return f"no choice of memory= makes it fit. What needs less: {LESS_MEMORY}"


def nothing_fits(cfg: DictConfig, least: Choice, budget: Budget) -> str:
    """Return the warning that nothing fits, with the choice and the nearest tier."""
    asked = cfg.memory.budget_gb
    key = "train.micro_batch_size=auto" if asked is None else f"memory.budget_gb={asked}"
    usable, limit = budget.usable_bytes(asked), budget.host_bytes
    tier = next((gb for gb in TIERS_GB if least.bytes <= budget.usable_bytes(float(gb))), None)
    nearest = "no tier takes that" if tier is None else f"the nearest tier that takes it is memory={tier}gb"
    beside = least.layout.host_bytes()
    host = f", beside {as_gb(beside)} of {as_gb(limit)} GB of its host" if beside > limit else ""
    return (
        f"{key}: nothing fits. What needs least is taken, train.micro_batch_size={least.micro_batch_size} with "
        f"{names_of(least.values)}: {as_gb(least.bytes)} GB by its computed peak, where a run may fill "
        f"{as_gb(usable)}{host}; {nearest}. What needs less: {LESS_MEMORY}."
    )


def saved_settings(cfg: DictConfig, budget: Budget) -> tuple[Values, Values]:
    """Return the values that a continued run keeps: those that must stay, and those that it chose by itself.

    Empty before the first checkpoint, and without what the user sets now. The second are those of a run that was asked
    for the same `memory`.
    """
    file, asked = _continued(cfg), cfg.memory.budget_gb
    saved = OmegaConf.create({} if file is None else read_mapping(file))  # what is wrong is said where it is continued
    free = [key for key in CHOSEN if asked is not None and is_free(key, budget.kept)]
    found = {key: value for key in free if (value := OmegaConf.select(saved, key, default=MISSING)) != MISSING}
    bound = {key: value for key, value in found.items() if key in BOUND}
    micro = OmegaConf.select(saved, "train.micro_batch_size")
    is_same = file is not None and file.parent == Path(cfg.run.dir)
    if not is_same or not isinstance(micro, int) or OmegaConf.select(saved, "memory.budget_gb") != asked:
        return bound, {}
    divides = (cfg.train.global_batch_size // budget.ranks) % micro == 0  # other ranks may continue
    sizes = {"train.micro_batch_size": micro if divides else AUTO} if _is_size_open(cfg, budget) else {}
    return bound, {**sizes, **found}


def _continued(cfg: DictConfig) -> Path | None:
    """Return the saved configuration of the run that is continued; None = none is."""
    folder, resume = Path(cfg.run.dir), cfg.run.resume
    if any(folder.glob("checkpoints/step_*")):
        return folder / CONFIG_NAME
    origin = None if resume in ("auto", "never") else Path(resume)
    places = () if origin is None else (origin, *origin.absolute().parents[1:2])  # a run, or a checkpoint of one
    return next((place / CONFIG_NAME for place in places if (place / CONFIG_NAME).is_file()), None)


def changed(cfg: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Return a configuration with other values."""
    cfg = cfg.copy()
    change(cfg, values)
    return cfg


def change(cfg: DictConfig, values: Mapping[str, Any]) -> None:
    """Set values of a configuration, nodes as a whole."""
    for key, value in values.items():
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
