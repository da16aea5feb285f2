"""What each rank of test_algorithms does. A hook of forked.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cascade_train.distributed.parallelize import like
from cascade_train.distributed.process_group import build_mesh, process_group
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.phase import BoundPhase
from tests.unit.engine.algorithms import NEED_WHOLE, OPTIONS, bound, same, train, weights

MODES = {"ddp": (2, 1), "fsdp": (1, 2)}
ROUNDED = ("adafactor", "adamw", "adamw_8bit", "lion")
STEPS, MORE = range(1, 4), range(4, 6)


def new(option: str, mesh: Any) -> BoundPhase:
    """Return a new phase; Muon needs as many rows as ranks."""
    return bound(option, mesh, row=option != "muon")


def rounded(option: str, mesh: Any) -> BoundPhase:
    """Return a new phase whose weights train in bf16."""
    return bound(option, mesh, dtype=torch.bfloat16)


def whole(phase: BoundPhase) -> dict[str, torch.Tensor]:
    """Return the weights that train, whole. Collective."""
    found = {}
    for (name, parameter), part in zip(phase.parameters.items(), weights(phase), strict=True):
        value: Any = like(parameter.detach(), part)
        found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def continued(phase: BoundPhase, store: CheckpointStore, path: Path) -> BoundPhase:
    """Return a new phase, put to a checkpoint."""
    state = phase.state_dict()
    store.load(path, state)
    phase.load_state_dict(state)
    return phase


def train_and_move(kind: str, make: Callable[[str, Any], BoundPhase], option: str, meshes: Any, out: Path) -> Any:
    """Yield where an option ends in each mode, and continued from each mode in each, and whether to the bit."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = {"rank": rank, "ranks": ranks}
    modes = ["ddp"] if option in NEED_WHOLE else [*MODES]
    for mode in modes:
        phase, store = make(option, meshes[mode]), CheckpointStore(out / f"{kind}{option}_{mode}")
        train(phase, STEPS, **place)
        path, at_three = store.save(3, phase.state_dict(), {}), whole(phase)
        train(phase, MORE, **place)
        yield f"{kind}{option} {mode}", whole(phase)
        for other in modes:
            moved = continued(make(option, meshes[other]), store, path)
            at_start = same([*at_three.values()], [*whole(moved).values()])
            train(moved, MORE, **place)
            exact = other != mode or same(weights(phase), weights(moved))
            every: list[Any] = [None] * ranks
            dist.all_gather_object(every, (at_start, exact))
            yield f"{kind}{option} {mode} to {other}", (every, whole(moved))


def train_every_option(out: Path) -> None:
    """Train each in each mode, and continue each checkpoint in each mode; note where it ends, and if to the bit."""
    found: dict[str, Any] = {}
    with process_group() as world:
        meshes = {mode: build_mesh(world, shape) for mode, shape in MODES.items()}
        for option in OPTIONS:
            found.update(train_and_move("", new, option, meshes, out))
        for option in ROUNDED:
            found.update(train_and_move("rounded ", rounded, option, meshes, out))
    if world.rank == 0:
        torch.save(found, out / "found.pt")
