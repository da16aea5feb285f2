"""Choose micro-batch size and memory savings by predicted peaks, which inform and never refuse a start."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from cascade_train.assembly.components import build_parts
from cascade_train.assembly.planning.devices import CONTEXT_BYTES, Budget, as_gb, free_host_bytes
from cascade_train.assembly.planning.memory import Memory, changed, divisors, layout_of
from cascade_train.assembly.planning.memory_trace import unloaded
from cascade_train.config.groups import option_files, typed_keys
from cascade_train.config.saved import CONFIG_NAME
from cascade_train.config.targets import class_constant
from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.distributed.process_group import World
from cascade_train.errors import LESS_MEMORY, ConfigError
from cascade_train.files.untrusted import read_mapping
from cascade_train.options import AUTO

log = logging.getLogger(__name__)
Values = dict[str, Any]
ENOUGH = 4
"""Micro-batch size from which on a GPU is busy. Assumed, not measured."""
MICRO, EXACT = "train.micro_batch_size", ("ema.device", "activation_checkpointing")
ROUNDING = ("train.base_weights", "optimizer.algorithm", "train.master_weights")
STRATEGIES = ((), EXACT[:1], EXACT, *((*EXACT, *ROUNDING[:n]) for n in (1, 2, 3)), (*EXACT, "parallel.cpu_offload"))
"""Keys that are set to save memory, the cheapest first; `EXACT` ones leave every number of a run as it is."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is set, with the largest micro-batch size that fits or else 1, and bytes of a rank's predicted peak."""

    values: Values
    bytes: int
    fits: bool
    layout: Memory

    def __str__(self) -> str:
        """Settings as they are typed, and the peak."""
        texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in self.values.items()}
        texts |= {"optimizer.algorithm": "adamw_8bit"} if isinstance(texts.get("optimizer.algorithm"), dict) else {}
        names = " ".join(f"{key.removesuffix('.algorithm')}={text}" for key, text in texts.items())
        return f"{names}: {as_gb(self.bytes)} GB by its computed peak"


def fit(cfg: DictConfig, world: World) -> None:
    """Set what `memory` and the micro-batch leave open, and log it. Collective; on a CPU only if a choice is asked for.

    Raises:
        ConfigError: a choice is asked for, and the memory of the run cannot be predicted.
    """
    free = from_every_rank(partial(free_gb, world.device, world.machine_ranks))
    gb, host_gb = (min(rank_gb) for rank_gb in zip(*free, strict=True))
    ranks = {"ranks": world.ranks, "machine_ranks": world.machine_ranks}
    budget = Budget(gb=gb, on_cuda=world.device.type == "cuda", host_gb=host_gb, kept=typed_keys(), **ranks)
    for key, value in from_rank_zero(partial(chosen, cfg, budget)).items() if budget.on_cuda or is_asked(cfg) else ():
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)


def chosen(cfg: DictConfig, budget: Budget) -> Values:
    """Log and return what to set; nothing if no step can be traced and no choice is asked for."""
    try:
        saved = saved_choice(cfg, budget)
        choice = choose(changed(cfg, saved), replace(budget, kept={*budget.kept, *saved}))
    except ConfigError:
        raise
    except Exception as error:  # a class of the user's own may need the values of tensors
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if not is_asked(cfg):
            log.info("The memory of this training is not predicted (%s).", reason)
            return {}
        remedy = f"Set {MICRO} to a number, and memory=none."
        raise ConfigError(f"The memory of this training cannot be predicted ({reason}). {remedy}") from error
    choice, asked = replace(choice, values={**saved, **choice.values}), cfg.memory.budget_gb
    of = f"memory.budget_gb={asked}" if isinstance(asked, float) else f"{as_gb(budget.gb * 1e9)} GB"
    log.info("%s, of %s (computed from the run's own step, not measured)", choice, of)
    if not choice.fits:
        log.warning("%s", too_large(cfg, choice, budget))
    return choice.values


def is_asked(cfg: DictConfig) -> bool:
    """Whether the configuration asks for a choice."""
    return cfg.train.micro_batch_size == AUTO or cfg.memory.budget_gb is not None


def saved_choice(cfg: DictConfig, budget: Budget) -> Values:
    """Values that a resumed run has chosen; if `memory` has changed, only those that bind its checkpoints."""
    folder, asked = Path(cfg.run.dir), cfg.memory.budget_gb
    saved = OmegaConf.create(read_mapping(folder / CONFIG_NAME) if any(folder.glob("checkpoints/step_*")) else {})
    is_same, micro = OmegaConf.select(saved, "memory.budget_gb") == asked, OmegaConf.select(saved, MICRO)
    keys = () if asked is None or not saved else {*sum(STRATEGIES, ())} if is_same else ROUNDING
    values = {key: OmegaConf.select(saved, key) for key in keys if budget.may_set(key)}
    divides = isinstance(micro, int) and (cfg.train.global_batch_size // budget.ranks) % micro == 0
    return {**values, MICRO: micro} if is_same and divides and _is_size_open(cfg, budget) else values


def choose(cfg: DictConfig, budget: Budget) -> Choice:
    """Choose the first strategy that fits, with its largest micro-batch size; if none fits, the one that needs least.

    An exact strategy is passed over for the next exact one if fewer than `ENOUGH` images fit.
    """
    share, tried, values = cfg.train.global_batch_size // budget.ranks, list[Choice](), savings(cfg, budget)
    sizes = divisors(share) if _is_size_open(cfg, budget) else [cfg.train.micro_batch_size]
    for keys in STRATEGIES:
        strategy = {key: values[key] for key in keys if key in values}
        fitting = [choice for choice in tried if choice.fits]
        if (fitting and not {*keys} <= {*EXACT}) or (tried and strategy.keys() <= tried[-1].values.keys()):
            continue
        layout = layout_of(changed(cfg, strategy), budget)
        if "parallel.cpu_offload" in strategy and layout.host_bytes() > budget.host_bytes:
            continue
        size = layout.largest(budget.usable_bytes(cfg.memory.budget_gb), sizes, share)
        need = layout.total(size or sizes[0], share // (size or sizes[0]))
        tried.append(
            Choice(values={**strategy, MICRO: size or sizes[0]}, bytes=need, fits=size is not None, layout=layout)
        )
        if size is not None and size >= min(ENOUGH, sizes[-1]):
            return tried[-1]
    return next((choice for choice in tried if choice.fits), min(tried, key=lambda choice: choice.bytes))


def savings(cfg: DictConfig, budget: Budget) -> Values:
    """Values by key that save memory in this run, without keys that the user has set."""
    if cfg.memory.budget_gb is None:
        return {}
    parts, algorithm = build_parts(unloaded(cfg)), cfg.optimizer.get("algorithm") or {}
    builds, adapts = "network" not in parts.stage.left_out, not parts.task.trains_network
    averages = cfg.ema.decay is not None or cfg.ema.post_hoc is not None
    is_adamw = algorithm.get("_target_") == "torch.optim.AdamW" and not algorithm.get("amsgrad")
    small = option_files("optimizer")["adamw_8bit"]["algorithm"]
    small |= {"betas": list(algorithm["betas"]), "eps": algorithm["eps"]} if is_adamw else {}
    rounds = (cfg.train.precision, cfg.train.master_weights) == ("bf16", "fp32") and parts.optimizer.rounds()
    offloads = not cfg.parallel.cpu_offload and not class_constant(str(algorithm.get("_target_")), "needs_whole")
    applicable = (
        ("ema.device", "cpu", budget.on_cuda and averages and cfg.ema.device is None),
        ("activation_checkpointing", True, builds and not cfg.activation_checkpointing),
        ("train.base_weights", "int8", builds and adapts and not cfg.train.base_weights and not cfg.task.get("dora")),
        ("optimizer.algorithm", small, is_adamw and {"betas", "eps"} <= set(algorithm)),
        ("train.master_weights", "bf16", rounds and not adapts),
        ("parallel.cpu_offload", True, budget.on_cuda and offloads),
    )
    return {key: value for key, value, applies in applicable if applies and budget.may_set(key)}


def too_large(cfg: DictConfig, choice: Choice, budget: Budget) -> str:
    """What to do about a choice that does not fit."""
    share, asked = cfg.train.global_batch_size // budget.ranks, cfg.memory.budget_gb
    size = choice.layout.largest(budget.usable_bytes(asked), divisors(share), share)
    remedy = f"What needs less: {LESS_MEMORY}" if size is None else f"{MICRO}={size} fits"
    usable = as_gb(budget.usable_bytes(asked))
    return f"{as_gb(choice.bytes)} GB by the computed peak, where a run may fill {usable}, may not fit. {remedy}."


def _is_size_open(cfg: DictConfig, budget: Budget) -> bool:
    return cfg.train.micro_batch_size == AUTO or (cfg.memory.budget_gb is not None and budget.may_set(MICRO))


def free_gb(device: torch.device, machine_ranks: int) -> tuple[float, float]:
    """A rank's free GB on its device, and on its host beside a GPU."""
    host = free_host_bytes() / machine_ranks / 1e9
    if device.type != "cuda":
        return host, math.inf
    free, whole = torch.cuda.mem_get_info(device)
    return min(whole, free + CONTEXT_BYTES) / 1e9, host
