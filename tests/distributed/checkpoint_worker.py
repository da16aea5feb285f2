"""What each rank of test_checkpoint does. A hook of forked.py."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cascade_train.distributed.consensus import from_every_rank, from_rank_zero
from cascade_train.engine.checkpoint import store as checkpoint
from cascade_train.engine.checkpoint.folder import Retention
from cascade_train.engine.checkpoint.store import CheckpointStore
from cascade_train.engine.run.directory import claim
from cascade_train.errors import ConfigError, RunError

FACTS = {"step": 4, "samples_seen": 32, "finished": False}


def whole(fill: float) -> dict[str, torch.Tensor]:
    """Return the unsharded state; an odd length, so that the shards differ in size."""
    return {"weight": torch.arange(21.0).reshape(7, 3) + fill, "norm": torch.arange(5.0) + fill, "step": torch.ones(())}


def sharded(fill: float) -> dict[str, object]:
    """Return the same state spread over the ranks."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    state = whole(fill)
    spread = [Replicate(), Shard(0)]
    return {
        "model": {
            "weight": distribute_tensor(state["weight"], mesh, spread),
            "norm": distribute_tensor(state["norm"], mesh, spread),
        },
        "optimizer": {"step": state["step"], "lr": 0.1},
    }


def matches(state: dict[str, object], fill: float) -> bool:
    """Whether a sharded state is whole(fill), on every rank."""
    expected = whole(fill)
    same = [torch.equal(state["model"][name].full_tensor(), expected[name]) for name in ("weight", "norm")]
    return all(same) and torch.equal(state["optimizer"]["step"], expected["step"])


def error_of(work, *kinds) -> str:
    """Return the kind and text of the error that `work` raises."""
    try:
        work()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def failing_on(rank: int):
    """Return a writer of tensors that finds the disk full on one rank."""
    original = FileSystemWriter.write_data

    def write_data(self, plan, planner):
        if dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        return original(self, plan, planner)

    return write_data


def broken_disk(store: CheckpointStore) -> dict[str, str]:
    """Fail on either rank, in tensors and in the manifest; every rank must learn of it."""
    found = {}
    original = FileSystemWriter.write_data
    for rank in (0, 1):
        FileSystemWriter.write_data = failing_on(rank)
        found[f"tensors_{rank}"] = error_of(lambda: store.save(6, sharded(1), FACTS), RunError)
    FileSystemWriter.write_data = original
    write_manifest = checkpoint.write_manifest
    checkpoint.write_manifest = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    found["manifest"] = error_of(lambda: store.save(6, sharded(1), FACTS), RunError)
    checkpoint.write_manifest = write_manifest
    facts = {**FACTS, "samples_seen": dist.get_rank()}
    found["facts"] = error_of(lambda: store.save(6, sharded(1), facts), AssertionError)
    return found


def only_on_rank(rank: int, error: Exception):
    """Return work that fails on one rank."""

    def work():
        if dist.get_rank() == rank:
            raise error
        return dist.get_rank()

    return work


def outcomes() -> dict[str, object]:
    """Share results and failures."""
    return {
        "zero": from_rank_zero(dist.get_rank),
        "every": from_every_rank(dist.get_rank),
        "config": error_of(lambda: from_every_rank(only_on_rank(1, ConfigError("a key"))), ConfigError),
        "defect": error_of(lambda: from_every_rank(only_on_rank(1, KeyError("a defect"))), KeyError, RunError),
    }


def run_directories(directory: Path) -> dict[str, object]:
    """Claim, save, continue, cut and refuse with two ranks."""
    config = {"run": {"seed": 0}, "train": {"max_steps": 8}, "model": {"width": 4}}
    run = claim(directory / "run", config=config, resume="auto")
    store = CheckpointStore(run.checkpoints)
    store.save(2, sharded(0), FACTS)
    again = claim(directory / "run", config=config, resume="auto")
    other = {**config, "model": {"width": 8}}
    return {
        "created": [run.created, again.created],
        "resume_from": again.resume_from.name,
        "other": error_of(lambda: claim(directory / "run", config=other, resume="auto"), ConfigError),
    }


def exercise_checkpoints(out: Path) -> None:
    """Run everything beside `one/step_4`, a checkpoint of one rank, and write what this rank saw."""
    dist.init_process_group("gloo")
    directory = out.parent
    store = CheckpointStore(directory / "two", retention=Retention(keep_last=1))
    seen: dict[str, object] = {}
    store.save(2, sharded(9), FACTS)
    seen["saved"] = store.save(4, sharded(0), FACTS).name
    state = sharded(5)
    seen["facts"] = store.load(directory / "two" / "step_4", state)
    seen["same_ranks"] = matches(state, 0)
    state = sharded(5)
    store.load(directory / "one" / "step_4", state)
    seen["from_one_rank"] = matches(state, 2)
    seen["broken"] = broken_disk(store)
    seen["left"] = from_rank_zero(lambda: sorted(path.name for path in store.directory.iterdir()))
    other = sharded(0)
    other["model"]["weight"] = torch.zeros(3)
    seen["other_model"] = error_of(lambda: store.load(directory / "two" / "step_4", other), ConfigError)
    seen["outcomes"] = outcomes()
    seen["run"] = run_directories(directory)
    (directory / f"rank_{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
