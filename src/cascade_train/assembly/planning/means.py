"""Means that save memory: which there are for a run, in which order they are tried, and how a user would set them.

Must not live here: which of them a run takes (fitting.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from cascade_train.assembly.components import build_parts
from cascade_train.assembly.planning.devices import Room
from cascade_train.assembly.planning.rehearsal import unloaded
from cascade_train.config.targets import class_constant

BOUND = ("optimizer.algorithm", "train.master_weights", "train.base_weights")
"""Keys that means set and that a run cannot change when it continues: its checkpoints hold what follows from them."""

CHOSEN = ("ema.device", "activation_checkpointing", "parallel.cpu_offload", *BOUND)
"""Keys that means set."""

Values = dict[str, Any]
"""Values of the configuration, by key."""


@dataclass(frozen=True, kw_only=True)
class Means:
    """What saves memory.

    Attributes:
        values: what is set.
        is_cheap: whether a run's numbers stay, up to rounding, and nearly its speed.
    """

    values: Values
    is_cheap: bool = True


def ladder(cfg: DictConfig, room: Room, kept: Collection[str]) -> Iterator[Means]:
    """Yield sets of means, from what costs nothing to what costs most; of what the user set, `kept`, none is changed.

    First those that leave a run's numbers as they are, one after the other; then with a frozen network in 8 bits, with
    moments of 8 bits, and weights in bf16; last with weights and optimizer on the host instead, where every step waits
    for the bus.
    """
    values: Values = {}
    yield Means(values={})
    if room.on_cuda and cfg.ema.decay is not None and cfg.ema.device is None and is_free("ema.device", kept):
        yield Means(values=(values := {"ema.device": "cpu"}))
    if not cfg.activation_checkpointing and is_free("activation_checkpointing", kept) and _builds_network(cfg):
        yield Means(values=(values := {**values, "activation_checkpointing": True}))
    if is_free("train.base_weights", kept) and _can_quantize(cfg):
        yield Means(values=(base := {**values, "train.base_weights": "int8"}), is_cheap=False)
    else:
        base = values
    if (algorithm := _of_8_bits(cfg.optimizer)) and is_free("optimizer.algorithm", kept):
        base = {**base, "optimizer.algorithm": algorithm}
        yield Means(values=base, is_cheap=False)
    if is_free("train.master_weights", kept) and _trains_in_bf16(cfg):
        yield Means(values={**base, "train.master_weights": "bf16"}, is_cheap=False)
    offloads = room.on_cuda and not _needs_whole(cfg.optimizer)
    if offloads and not cfg.parallel.cpu_offload and is_free("parallel.cpu_offload", kept):
        yield Means(values={**values, "parallel.cpu_offload": True}, is_cheap=False)


def _builds_network(cfg: DictConfig) -> bool:
    """Return whether the run has the stage's network, which checkpointing recomputes; a previewer's has none."""
    return "network" not in build_parts(unloaded(cfg)).stage.left_out


def _needs_whole(optimizer: DictConfig) -> bool:
    """Return whether the algorithm refuses offloaded weights."""
    target = (optimizer.get("algorithm") or {}).get("_target_")
    return target == "torch.optim.Adafactor" or bool(target and class_constant(target, "needs_whole"))


def _can_quantize(cfg: DictConfig) -> bool:
    """Return whether a network is frozen whose linear layers can be in 8 bits, and are not yet."""
    trains = class_constant(cfg.task._target_, "trains_network")
    return not trains and cfg.train.base_weights is None and not cfg.task.get("dora") and _builds_network(cfg)


def _trains_in_bf16(cfg: DictConfig) -> bool:
    """Return whether a network trains that computes in bf16, on fp32 masters that its algorithm can do without."""
    if (cfg.train.precision, cfg.train.master_weights) != ("bf16", "fp32"):
        return False
    parts = build_parts(unloaded(cfg))
    return parts.task.trains_network and parts.optimizer.rounds()


def is_free(key: str, kept: Collection[str]) -> bool:
    """Return whether the user set neither a key nor something in it, nor, of an optimizer, its group."""
    blocking = {key, "optimizer"} if key.startswith("optimizer") else {key}
    return not any(typed in blocking or typed.startswith(f"{key}.") for typed in kept)


def _of_8_bits(optimizer: DictConfig) -> Values | None:
    """Return AdamW with moments of 8 bits in the place of torch's; None for other algorithms."""
    algorithm: Mapping[Any, Any] = optimizer.get("algorithm") or {}
    is_plain = algorithm.get("_target_") == "torch.optim.AdamW" and not algorithm.get("amsgrad")
    if not is_plain or not {"betas", "eps"} <= set(algorithm):
        return None
    settings = {"betas": list(algorithm["betas"]), "eps": algorithm["eps"], "block_size": 64}
    target = "cascade_train.engine.algorithms.adamw_8bit.AdamW8bit"
    return {"_target_": target, "_partial_": True, **settings}


def names_of(values: Values) -> str:
    """Return means as keys are set."""
    return " ".join(_shown(key, value) for key, value in values.items()) or "nothing more"


def _shown(key: str, value: Any) -> str:
    if key == "optimizer.algorithm":
        return "optimizer=adamw_8bit"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"
