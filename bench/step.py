"""What an optimizer step costs beside the bare model: `Trainer.train_step` against plain torch, in the same processes.

    python bench/step.py --out bench/results/step.json

Bare is a copy of the network in plain torch, on the inputs that the task gave it: forward, square, backward,
clip_grad_norm_, fused AdamW, foreach average. On two ranks each has its own micro-batch, and bare is what a rank would
do with it alone. FSDP2 is the bare step with weights split by `fully_shard`: the floor of what is sharded. Sent is what
it takes to gather all weights and scatter all gradients in one piece each. All take turns, and process time is counted,
so that ratios are the claims. `loop` is the step with the encoders' results remembered, as a cache gives them.

Deep is the depth of C-3.6B (64 triples, 1,550 tensors) with a width of 16: almost all of its time is the host's. Its
units are gathered one by one, as those of C-3.6B are. Prints a table, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cascade_train.__main__ import launch
from cascade_train.distributed import parallelize, sharded
from cascade_train.engine.loop import Trainer
from cascade_train.engine.phase import training_state

DEEP = (
    *("model.weights=null", "model.network.block_out_channels=[16,16]", "model.network.num_attention_heads=[1,1]"),
    *("model.network.down_num_layers_per_block=[8,24]", "model.network.up_num_layers_per_block=[24,8]"),
    "train.global_batch_size=2",
)
SPLIT, BF16 = "parallel=fsdp", "train.precision=bf16"
KEPT = "parallel.reshard_after_forward=false"
COMMON = (
    *("task=finetune", "model=c_tiny", "sample.every_steps=null", "validate.every_steps=null", "data.num_workers=0"),
    "checkpoint.asynchronous=true",
)
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "c_tiny, one rank": (1, ()),
    "sd_tiny, one rank": (1, ("model=sd_tiny",)),
    "c_tiny, two ranks, ddp": (2, ("parallel=ddp",)),
    "c_tiny, two ranks, sharded": (2, (SPLIT,)),
    "c_tiny, two ranks, sharded, unit by unit": (2, (SPLIT,)),
    "deep, one rank": (1, DEEP),
    "deep, one rank, bf16": (1, (*DEEP, BF16)),
    "deep, two ranks, ddp": (2, (*DEEP, "parallel=ddp")),
    "deep, two ranks, sharded": (2, (*DEEP, SPLIT)),
    "deep, two ranks, sharded, bf16": (2, (*DEEP, SPLIT, BF16)),
    "deep, two ranks, sharded, kept": (2, (*DEEP, SPLIT, KEPT)),
}
"""Ranks, and what is changed in `task=finetune model=c_tiny`."""


class Bare:
    """The network in plain torch, with what a step needs and no more."""

    def __init__(self, trainer: Trainer, seen: dict[str, Any]) -> None:
        """Make the network of a run once more; `seen` is what it was called with."""
        network = trainer.task.stage.network
        self._network = type(network).from_config(network.config).to(next(network.parameters()).device).train()
        self._dtype = torch.bfloat16 if seen["bf16"] else torch.float32
        self._args, self._kwargs = seen["inputs"]
        self._parameters = list(self._network.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-4, weight_decay=0.01, fused=True)
        self._average = [p.detach().clone() for p in self._parameters]

    def step(self) -> None:
        """Take an optimizer step."""
        with torch.autocast("cpu", dtype=self._dtype, enabled=self._dtype == torch.bfloat16):
            self._backward()
        self._update()

    def _backward(self) -> None:
        pred = self._network(*self._args, **self._kwargs)
        pred = pred[0] if isinstance(pred, tuple) else pred
        pred.float().square().mean().backward()

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(self._average, [p.detach() for p in self._parameters], 0.01)


class Split(Bare):
    """The same with weights split by FSDP2 into the trainer's units, and no more; each rank clips by its own norm."""

    def __init__(self, trainer: Trainer, seen: dict[str, Any]) -> None:
        """Make the network of a run once more, and shard it as the run's is."""
        super().__init__(trainer, seen)
        (mesh,) = {p.device_mesh for p in trainer.phases[0].parameters.values()}
        keep = KEPT not in seen["overrides"]
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for unit in sharded.gathered_alone(self._network, self._network.units()):
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=keep)
        fully_shard(self._network, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self._sharded = list(self._network.parameters())
        self._parameters = [parallelize.shard_of(p) for p in self._sharded]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-4, weight_decay=0.01, fused=True)
        self._average = [p.detach().clone() for p in self._parameters]

    def step(self) -> None:
        """Take an optimizer step."""
        self._backward()
        parallelize.lend(zip(self._sharded, self._parameters, strict=True))
        self._update()
        for parameter in self._sharded:
            parameter.grad = None

    def exchange(self) -> None:
        """Gather weights and scatter gradients of this size in one piece each, with no work beside it."""
        mesh = self._sharded[0].device_mesh  # type: ignore[attr-defined]
        group, size = mesh.get_group(mesh.ndim - 1), -(-sum(p.numel() for p in self._sharded) // mesh.size(-1))
        weights, gradients = (torch.zeros(size * mesh.size(-1), dtype=d) for d in (self._dtype, torch.float32))
        dist.all_gather_into_tensor(weights, weights[:size].clone(), group=group)
        dist.reduce_scatter_tensor(gradients[:size].clone(), gradients, group=group)


def seconds(work: Callable[[], object]) -> float:
    """Return the process time, of all threads, that a piece of work takes on this rank."""
    dist.barrier()
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measure(trainer: Trainer, rounds: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Take turns between steps of the trainer and bare ones; return seconds and counts of this rank."""
    stage, feed = trainer.task.stage, iter(trainer.feed)
    seen: dict[str, Any] = {"bf16": BF16 in overrides, "overrides": overrides}

    def keep(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.setdefault("inputs", (args, kwargs))

    hook = stage.network.register_forward_pre_hook(keep, with_kwargs=True)
    first = seconds(lambda: trainer.train_step(next(feed)))
    hook.remove()
    turns = {"bare": Bare(trainer, seen).step}
    if SPLIT in overrides:
        split = Split(trainer, seen)
        turns |= {"fsdp2": split.step, "sent": split.exchange}
    found: dict[str, Any] = {"first": first, "bare_first": seconds(turns["bare"]), "step": [], "loop": []}
    found |= {name: [] for name in turns}
    for _ in range(rounds):
        take_turns({"step": partial(trainer.train_step, next(feed)), **turns}, found)
    remembered = [(name, remembering(getattr(stage, name))) for name in ("encode", "conditions")]
    for name, function in remembered:
        setattr(stage, name, function)
    trainer.train_step(next(feed))
    for _ in range(rounds):
        take_turns({"loop": partial(trainer.train_step, next(feed)), **turns}, found)
    found["tensors"] = len(trainer.phases[0].parameters)
    found["save"] = [saving(trainer, step) for step in (1, 2, 3)]
    return found


def take_turns(turns: Mapping[str, Callable[[], object]], found: dict[str, Any]) -> None:
    """Add the time of one step of each kind, in an order that is drawn for each round, the same on all ranks."""
    names = sorted(turns)
    random.Random(len(found[names[0]])).shuffle(names)  # caches and memory are as the one before leaves them
    for name in names:
        found[name].append(seconds(turns[name]))


def saving(trainer: Trainer, step: int) -> tuple[float, float]:
    """Return the process time of a save until the loop goes on, and of all of it."""
    facts: dict[str, Any] = {}
    kept = seconds(lambda: trainer.store.save(step, training_state(trainer.phases, trainer.task), facts))
    return kept, kept + seconds(trainer.store.wait)


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that answers every call with the result of its first."""
    results: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(function(*args, **kwargs))
        return results[0]

    return call


def be_rank(case: str, rounds: int, out: Path) -> None:
    """Do one rank's part of a case; rank 0 writes what it measured."""
    torch.set_num_threads(1)

    def looked_at(self: Trainer) -> None:
        found = measure(self, rounds, CASES[case][1])
        if self.world.is_main:
            out.write_text(json.dumps(found))
        self.max_steps = self.step

    if "deep" in case or "unit by unit" in case:
        sharded.GATHERED_AT_ONCE_BYTES = 0
    Trainer.run = looked_at  # type: ignore[method-assign]
    common = COMMON if case != "sd_tiny, one rank" else [each for each in COMMON if each != "model=c_tiny"]
    assert launch([*common, "ema.decay=0.99", f"run.dir={out.with_suffix('')}", *CASES[case][1]]) == 0


def run_case(case: str, rounds: int, directory: Path) -> dict[str, Any]:
    """Start the ranks of a case and return what rank 0 measured."""
    out = directory / (case.replace(", ", "_").replace(" ", "_") + ".json")
    command = [__file__, "--case", case, "--rounds", str(rounds), "--out", str(out)]
    run_ranks(command, CASES[case][0])
    return json.loads(out.read_text())


def run_ranks(command: list[str], ranks: int) -> None:
    """Run a script of Python as so many ranks, to their end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port} if ranks > 1 else {}
        env = {**os.environ, **{key: str(value) for key, value in place.items()}, "MASTER_ADDR": "127.0.0.1"}
        children.append(subprocess.Popen([sys.executable, *command], env={**env, "OMP_NUM_THREADS": "1"}))
    assert [child.wait() for child in children] == [0] * ranks, command


def facts() -> dict[str, str]:
    """Return what was measured, when and on what."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    return {"commit": commit.strip(), "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine}


def row(case: str, found: dict[str, Any]) -> str:
    """Return a case's line of the table."""
    step, loop, bare = (statistics.median(found[name]) * 1e3 for name in ("step", "loop", "bare"))
    kept, whole = (statistics.median(each) for each in zip(*found["save"], strict=True))
    floor, sent = (
        f"{statistics.median(found[name]) * 1e3 / bare:.2f}" if name in found else "" for name in ("fsdp2", "sent")
    )
    ratios = f"{loop / bare:.2f} | {floor} | {sent} | {step / bare:.2f}"
    return (
        f"| {case} | {found['tensors']} | {bare:.0f} | {loop:.0f} | {step:.0f} | {ratios} |"
        f" {found['first']:.2f} | {found['bare_first']:.2f} | {kept:.2f} | {whole:.2f} |"
    )


HEAD = (
    "| case | tensors | bare, ms | loop, ms | step, ms | loop / bare | FSDP2 / bare | sent / bare |"
    " step / bare | first step, s | bare, s | save: loop waits, s | save: all, s |"
)


def main() -> None:
    """Measure, print, and write JSON and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("bench/results/step.json"))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        return be_rank(args.case, args.rounds, args.out)
    cases = [case for case in CASES if args.only in case]
    with tempfile.TemporaryDirectory() as directory:
        results = {case: run_case(case, args.rounds, Path(directory)) for case in cases}
    lines = [HEAD, "|" + "---|" * 13, *(row(case, found) for case, found in results.items())]
    print(json.dumps(facts()), "\n".join(lines), sep="\n\n")
    args.out.write_text(json.dumps({**facts(), "rounds": args.rounds, "cases": results}) + "\n")
    return None


if __name__ == "__main__":
    main()
