"""What makes a training fit its device: the micro-batch, and means that save memory, chosen by computed peaks.

Lives here: the choice, and the refusal of what cannot fit. Must not live here: how memory is known (memory.py).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from cascade_train.assembly.planning.devices import Room, own_room
from cascade_train.assembly.planning.means import BOUND, CHOSEN, Means, Values, is_free, ladder, names_of
from cascade_train.assembly.planning.memory import Memory, memory_of, over_ranks
from cascade_train.assembly.planning.rehearsal import Rehearsed, count_parameters
from cascade_train.config.groups import typed_keys
from cascade_train.config.saved import CONFIG_NAME, to_plain
from cascade_train.config.schema import AUTO
from cascade_train.config.targets import class_constant
from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.distributed.process_group import World
from cascade_train.errors import LESS_MEMORY, ConfigError
from cascade_train.files.untrusted import read_yaml

log = logging.getLogger(__name__)

ENOUGH = 4
"""Micro-batch from which on a GPU is busy. Assumed, not measured."""

MOST_OFF = 0.05
"""By how much a computed peak may be too high, beside what the allocator's fragments take."""

CHECKED_PARAMETERS = 20 * 10**6
"""Of all modules: a start with fewer is not computed beforehand."""

TIERS_GB = (16, 24, 48, 80)
"""Options of `memory`."""

_COUNTED: dict[str, int] = {}
"""Parameters, by the classes of a run, the configuration of its model and whether its data is a cache."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The settings by which a training fits its device.

    Attributes:
        values: of the configuration that the choice changes.
        micro_batch_size: of the run.
        bytes: of a rank's computed peak.
        host_bytes: of what a rank has in host memory.
        whole: memory of a rank that holds all weights.
        steps: what was rehearsed.
    """

    values: Values
    micro_batch_size: int
    bytes: int
    host_bytes: int
    whole: Memory
    steps: Rehearsed

    def names(self) -> str:
        """Return the means, as keys are set."""
        return names_of(self.values)


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a training must fit: the memory of each of some ranks, and the settings that stay as they are."""

    room: Room
    ranks: int
    machine_ranks: int
    kept: Collection[str] = ()
    """Keys and groups that the user set."""
    known: dict[str, tuple[Memory, Rehearsed]] = field(default_factory=dict, compare=False, repr=False)
    """What was rehearsed, which no micro-batch and no budget changes."""

    def memory_of(self, cfg: DictConfig) -> tuple[Memory, Rehearsed]:
        """Return the memory of a rank that holds all weights, and the steps, each configuration rehearsed once."""
        same = changed(cfg, {"train.micro_batch_size": None, "memory.budget_gb": None})
        key = json.dumps(to_plain(same), default=str)
        if key not in self.known:
            self.known[key] = memory_of(cfg, on_cuda=self.room.on_cuda)
        return self.known[key]


def fit(cfg: DictConfig, world: World) -> None:
    """Choose what fits the devices of a run, in place, and refuse a run that cannot fit. Collective.

    Nothing is loaded or written. What a run that continues here began with stays, where it still fits.

    Raises:
        ConfigError: it does not fit; names what does.
    """
    rooms = from_every_rank(partial(own_room, world.device, world.machine_ranks))
    room = dataclasses.replace(min(rooms, key=lambda each: each.gb), host_gb=min(each.host_gb for each in rooms))
    place = Place(room=room, ranks=world.ranks, machine_ranks=world.machine_ranks, kept=typed_keys())
    values, notes = from_rank_zero(partial(_known, cfg, place))
    change(cfg, values)
    for note in notes if world.is_main else ():
        log.info("%s", note)


def _known(cfg: DictConfig, place: Place) -> tuple[Values, list[str]]:
    """Return what to set, and what to say of it, where a step can be rehearsed at all."""
    is_open = cfg.train.micro_batch_size == AUTO or cfg.memory.budget_gb is not None
    try:
        return _decided(cfg, place, is_open)
    except ConfigError:
        raise
    except Exception as error:  # a class of the user's own may need the values of tensors
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if is_open:
            raise ConfigError(
                f"The memory of this training cannot be computed beforehand ({reason}). Set train.micro_batch_size to "
                "a number, and memory=none."
            ) from error
        return {}, [f"The memory of this training is not computed beforehand ({reason})."]


def _decided(cfg: DictConfig, place: Place, is_open: bool) -> tuple[Values, list[str]]:
    if not is_open and _counted(cfg) < CHECKED_PARAMETERS:
        return {}, []
    bound, first = _earlier(cfg, place)
    stays, place = changed(cfg, bound), dataclasses.replace(place, kept={*place.kept, *bound})
    choice = _still(stays, first, place)
    if choice is None:
        choice, first = choose(stays, place), {}
    values = {**bound, **first, **choice.values, "train.micro_batch_size": choice.micro_batch_size}
    check(changed(cfg, values), choice, place)
    budget, here = (
        cfg.memory.budget_gb,
        f"{_gb(place.room.gb * 1e9)} GB{'' if place.room.on_cuda else ' free on this host'}",
    )
    of = here if budget in (None, AUTO) else f"memory.budget_gb={budget}, here are {here}"
    said = f"micro_batch_size={choice.micro_batch_size}: {_gb(choice.bytes)} GB by its computed peak, of {of}"
    new = {key: value for key, value in values.items() if key in CHOSEN and OmegaConf.select(cfg, key) != value}
    chosen = f"memory.budget_gb={budget} chose {names_of(new)}"
    return values, [said, *([chosen] if budget is not None else [])]


def _counted(cfg: DictConfig) -> int:
    """Return a model's number of parameters; it is built once per process, which runs of a sweep share."""
    of_run = class_constant(cfg.data._target_, "is_cache"), cfg.task._target_, cfg.objective._target_
    key = f"{of_run} {OmegaConf.to_container(cfg.model, resolve=True)}"
    if key not in _COUNTED:
        _COUNTED[key] = count_parameters(cfg)
    return _COUNTED[key]


def _still(cfg: DictConfig, first: Values, place: Place) -> Choice | None:
    """Return what an earlier start chose, where there was one and it still fits."""
    try:
        choice = choose(changed(cfg, {**first, "memory.budget_gb": None}), place) if first else None
    except ConfigError:  # of no micro-batch that divides
        return None
    return choice if choice is not None and (_is_held(choice, place) or cfg.memory.allow_overflow) else None


def choose(cfg: DictConfig, place: Place) -> Choice:
    """Return the cheapest means, and the largest micro-batch, with which a training fits its budget.

    Means that leave its numbers as they are may be added for a micro-batch of `ENOUGH`; others only where nothing else
    fits. A configuration that leaves nothing open comes back as it is, whether it fits or not; with
    `memory.allow_overflow` one of which nothing fits comes back with the last means.

    Raises:
        ConfigError: nothing fits.
    """
    budget, share = cfg.memory.budget_gb, cfg.train.global_batch_size // place.ranks
    is_open = _is_open(cfg, place)
    sizes = [size for size in range(1, share + 1) if share % size == 0] if is_open else [cfg.train.micro_batch_size]
    room = place.room if budget in (None, AUTO) else Room(gb=budget, on_cuda=place.room.on_cuda)
    best = least = None
    for means in ladder(cfg, place.room, place.kept) if budget is not None else [Means(values={})]:
        if best is not None and not means.is_cheap:
            break
        least = _rehearsed(cfg, means, place, room, sizes)
        has_host = least.host_bytes <= place.room.usable_host_bytes
        if not has_host and set(means.values) == {"ema.device"}:  # the host cannot take the average
            return choose(cfg, dataclasses.replace(place, kept={*place.kept, "ema.device"}))
        fits = least.bytes <= room.usable_bytes and has_host
        if fits and (not means.is_cheap or least.micro_batch_size >= min(ENOUGH, sizes[-1])):
            return least
        best = best or (least if fits else None)
    assert least is not None
    if best is None and (is_open or budget is not None) and not cfg.memory.allow_overflow:
        raise ConfigError(_nothing_fits(cfg, least, dataclasses.replace(room, host_gb=place.room.host_gb)))
    return best or least


def _is_open(cfg: DictConfig, place: Place) -> bool:
    """Return whether the micro-batch is to be chosen."""
    micro = cfg.train.micro_batch_size
    return micro == AUTO or (cfg.memory.budget_gb is not None and "train.micro_batch_size" not in place.kept)


def _rehearsed(cfg: DictConfig, means: Means, place: Place, room: Room, sizes: Sequence[int]) -> Choice:
    """Return the largest micro-batch that fits with some means, or the smallest where none does."""
    trial, share = changed(cfg, means.values), cfg.train.global_batch_size // place.ranks
    whole, steps = place.memory_of(trial)
    has_gb = place.room.gb if place.room.on_cuda else math.inf  # the device decides the mode, not the budget
    memory = over_ranks(trial, whole, place.ranks, machine_ranks=place.machine_ranks, device_gb=has_gb)
    size = memory.largest(room.usable_bytes, sizes, share) or sizes[0]
    need = memory.total(size, share // size)
    beside = memory.host_bytes()
    return Choice(values=means.values, micro_batch_size=size, bytes=need, host_bytes=beside, whole=whole, steps=steps)


def check(cfg: DictConfig, choice: Choice, place: Place) -> None:
    """Refuse a run whose computed peak its device does not hold.

    Raises:
        ConfigError: names what fits.
    """
    if _is_held(choice, place):
        return
    said = (
        f"This run needs {_gb(choice.bytes)} GB by its computed peak, and each rank has {_gb(place.room.gb * 1e9)}, at "
        f"train.micro_batch_size={choice.micro_batch_size}: {remedy(cfg, place)}. memory.allow_overflow=true starts it "
        "nevertheless."
    )
    if not cfg.memory.allow_overflow:
        raise ConfigError(said)
    log.warning("%s", said)


def _is_held(choice: Choice, place: Place) -> bool:
    """Return whether a device holds a computed peak, which may be a little too high."""
    return choice.bytes <= place.room.gb * 1e9 * (1.0 + MOST_OFF)


def remedy(cfg: DictConfig, place: Place) -> str:
    """Return what makes a run fit that does not: a micro-batch, else means, else what is to be tried."""
    cfg = changed(cfg, {"memory.allow_overflow": False})
    trial = changed(cfg, {"train.micro_batch_size": AUTO, "memory.budget_gb": None})
    try:
        return f"train.micro_batch_size={choose(trial, place).micro_batch_size} fits"
    except ConfigError:
        trial = changed(cfg, {"memory.budget_gb": AUTO, "train.micro_batch_size": AUTO})
    try:
        found = choose(trial, place)
    except ConfigError:
        return f"no choice of memory= makes it fit. What needs less: {LESS_MEMORY}"
    size = f"train.micro_batch_size={found.micro_batch_size}"
    return f"memory=auto fits, by {found.names()} at {size}"


def _nothing_fits(cfg: DictConfig, least: Choice, room: Room) -> str:
    budget = cfg.memory.budget_gb
    asked = "train.micro_batch_size=auto" if budget is None else f"memory.budget_gb={budget}"
    tried = f" with {least.names()}" if least.values else ""
    host = ""
    if least.host_bytes > room.usable_host_bytes:
        host = f", beside {_gb(least.host_bytes)} of the {_gb(room.usable_host_bytes)} GB that it may fill of its host"
    return (
        f"{asked}: no micro-batch fits{tried}. {least.micro_batch_size} a rank needs {_gb(least.bytes)} GB by its "
        f"computed peak, and a run may fill {_gb(room.usable_bytes)} of {_gb(room.gb * 1e9)}{host}. What needs less: "
        f"{LESS_MEMORY}."
    )


def _earlier(cfg: DictConfig, place: Place) -> tuple[Values, Values]:
    """Return the values that a continued run keeps: those that must stay, and those that it chose by itself.

    Empty before the first checkpoint, and without what the user sets now. The second are those of a run that was asked
    for the same `memory`.
    """
    file, budget = _continued(cfg), cfg.memory.budget_gb
    try:
        saved = OmegaConf.create(read_yaml(file.read_bytes()) if file is not None else {})
    except ValueError:
        saved = OmegaConf.create()  # what is wrong is said where the run is continued
    free = [key for key in CHOSEN if budget is not None and is_free(key, place.kept)]
    found = {key: value for key in free if (value := OmegaConf.select(saved, key, default=MISSING)) != MISSING}
    bound = {key: value for key, value in found.items() if key in BOUND}
    micro = OmegaConf.select(saved, "train.micro_batch_size")
    is_same = file is not None and file.parent == Path(cfg.run.dir)
    if not is_same or not isinstance(micro, int) or OmegaConf.select(saved, "memory.budget_gb") != budget:
        return bound, {}
    divides = (cfg.train.global_batch_size // place.ranks) % micro == 0  # other ranks may continue
    sizes = {"train.micro_batch_size": micro if divides else AUTO} if _is_open(cfg, place) else {}
    return bound, {**sizes, **found}


def _continued(cfg: DictConfig) -> Path | None:
    """Return the configuration of the run from whose checkpoint this one goes on; None = it starts anew."""
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


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f}" if count < 9.95e9 else f"{count / 1e9:.1f}"
