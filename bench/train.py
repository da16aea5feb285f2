"""What a run's own step costs on this machine's device: images/s, MFU, peak memory, host time and launches.

    python bench/train.py --out bench/results/train.json -- task=lora model=c_1b data=shapes debug=random_weights
    python bench/train.py --peer ../StableCascade -- task=finetune model=c_tiny

What follows `--` are the overrides of the run. The data of a few steps is drawn before and repeats; the first steps are
not measured. Beside the measured peak stands its ratio to the one that the run computed as it started.

`--peer` names a checkout of the original (github.com/Stability-AI/StableCascade): its network of Stage B or C gets the
run's weights and inputs, must predict the same, and then takes turns with the run: its forward, backward, clip, AdamW
and average beside `Trainer.train_step` with the encoders' results remembered. Only a whole network in training has a
peer. FLOPs are counted in a forward pass of the network, and three times that is a step (two for a frozen network, one
more with gradient checkpointing): encoders are not counted.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import itertools
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `bench` is a package of this checkout

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from bench.soak import commit
from bench.step import remembering
from cascade_train.__main__ import launch
from cascade_train.assembly.planning import strategies
from cascade_train.assembly.planning.devices import CONTEXT_BYTES, Budget
from cascade_train.batch import Batch
from cascade_train.engine.loop import Trainer
from cascade_train.models.cascade.family import original_state
from cascade_train.models.cascade.unet_config import BLOCK_TYPES

BATCHES = 4
"""Steps whose data is drawn before anything is timed; they repeat."""
QUIET = ("sample.every_steps=null", "validate.every_steps=null", "checkpoint.every_steps=null", "log.every_steps=null")
DENSE_BF16_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.2, "RTX 3090": 71.0}
"""Peaks without sparsity, of the SXM form, from NVIDIA's data sheets, by a part of the device's name."""

BOTH = {
    "c_in": "in_channels",
    "c_out": "out_channels",
    "c_r": "timestep_ratio_embedding_dim",
    "patch_size": "patch_size",
    "c_cond": "conditioning_dim",
    "c_hidden": "block_out_channels",
    "nhead": "num_attention_heads",
    "c_clip_seq": "clip_seq",
    "kernel_size": "kernel_size",
    "self_attn": "self_attn",
    "t_conds": "timestep_conditioning_type",
}
STAGE_C = {
    "c_clip_text": "clip_text_in_channels",
    "c_clip_text_pooled": "clip_text_pooled_in_channels",
    "c_clip_img": "clip_image_in_channels",
    "switch_level": "switch_level",
}
STAGE_B = {
    "c_clip": "clip_text_pooled_in_channels",
    "c_effnet": "effnet_in_channels",
    "c_pixels": "pixel_mapper_in_channels",
}
"""The original's argument -> ours."""


class Original:
    """The original's network and its training step, on the inputs of a run."""

    def __init__(self, checkout: Path, network: nn.Module, seen: dict[str, Any]) -> None:
        """Make the network with the run's weights; RuntimeError where it predicts something else."""
        config, arguments = network.config, seen["arguments"]
        is_stage_c = config.clip_text_in_channels is not None
        names = BOTH | (STAGE_C if is_stage_c else STAGE_B)
        letters = dict(zip(BLOCK_TYPES, "CTA", strict=True))
        lists = {
            "blocks": [list(config.down_num_layers_per_block), list(config.up_num_layers_per_block)],
            "block_repeat": [list(config.down_blocks_repeat_mappers), list(config.up_blocks_repeat_mappers)],
            "level_config": ["".join(letters[name] for name in level) for level in config.block_types_per_layer],
            "dropout": list(config.dropout),
        }
        values = {theirs: getattr(config, ours) for theirs, ours in names.items()}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        values["nhead"] = [heads or -1 for heads in values["nhead"]]
        device = next(network.parameters()).device
        made = original_class(checkout, "stage_c" if is_stage_c else "stage_b")(**values, **lists).to(device)
        made.load_state_dict(original_state(network.state_dict()))
        self._network, self._average = made.train(), copy.deepcopy(made).eval()
        self._optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4)
        self._autocast = {"device_type": device.type, "dtype": torch.bfloat16, "enabled": seen["is_bf16"]}
        given = inspect.signature(type(network).forward).bind(network, *arguments[0], **arguments[1]).arguments
        theirs = {"sample": "x", "timestep_ratio": "r"} | ({} if is_stage_c else {"clip_text_pooled": "clip"})
        self._inputs = {theirs.get(name, name): v for name, v in given.items() if isinstance(v, Tensor)}
        self._check(network, arguments)

    @torch.no_grad()
    def _check(self, network: nn.Module, arguments: tuple[Any, Any]) -> None:
        """Compare predictions without dropout; RuntimeError where they differ by more than the number format."""
        was_training = network.training
        network.eval()
        with torch.autocast(**self._autocast):
            ours = network(*arguments[0], **{**arguments[1], "return_dict": False})[0].float()
            self._network.eval()
            theirs = self._network(**self._inputs).float()
        network.train(was_training)
        self._network.train()
        error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
        if not error <= (3e-2 if self._autocast["enabled"] else 1e-4):
            raise RuntimeError(f"the original predicts something else: relative error {error:.1e}")

    def step(self) -> None:
        """Take an optimizer step as train/train_c.py and train/base.py do."""
        with torch.autocast(**self._autocast):
            pred = self._network(**self._inputs)
            loss = nn.functional.mse_loss(pred, torch.zeros_like(pred), reduction="none").mean(dim=[1, 2, 3])
        loss.mean().backward()
        nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._average.update_weights_ema(self._network, beta=0.99)


def original_class(checkout: Path, stage: str) -> Callable[..., Any]:
    """Import a stage's class from a checkout, without the control networks' libraries, which it does not need."""
    for name, attributes in (("modules", {"__path__": [str(checkout / "modules")]}), ("modules.controlnet", {})):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(attributes)
    vars(sys.modules["modules.controlnet"])["ControlNetDeliverer"] = None
    return getattr(importlib.import_module(f"modules.{stage}"), {"stage_c": "StageC", "stage_b": "StageB"}[stage])


def measure(trainer: Trainer, warmup: int, steps: int, rounds: int, peer: Path | None) -> dict[str, Any]:
    """Step the trainer, and the peer in turns, and return what both took."""
    device, network, feed = trainer.world.device, trainer.task.stage.network, iter(trainer.feed)
    drawn = itertools.cycle([next(feed) for _ in range(BATCHES)])
    seen: dict[str, Any] = {}

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not seen and torch.is_grad_enabled():
            seen.update(arguments=(args, kwargs), is_bf16=is_bf16((*args, *kwargs.values())))

    hook = network.register_forward_pre_hook(keep, with_kwargs=True)
    first = timed(lambda: trainer.train_step(next(drawn)), 1, device)["wall_s"]
    hook.remove()
    found: dict[str, Any] = {"first_step_s": first}
    timed(lambda: trainer.train_step(next(drawn)), warmup, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    rows = [timed(lambda: trainer.train_step(next(drawn)), steps, device) for _ in range(rounds)]
    found |= {"step": rows, "peak_gib": peak_gib(device), "launches": launches(trainer, next(drawn))}
    if peer is not None:
        for name in ("encode", "conditions"):
            setattr(trainer.task.stage, name, remembering(getattr(trainer.task.stage, name)))
        original = Original(peer, network, seen)
        for step in (original.step, lambda: trainer.train_step(next(drawn))):
            timed(step, warmup, device)
        found |= {"loop": [], "peer": []}
        for _ in range(rounds):
            found["loop"].append(timed(lambda: trainer.train_step(next(drawn)), steps, device))
            found["peer"].append(timed(original.step, steps, device))
    return found | flops(network, seen["arguments"], trainer)  # last: torch 2.11 compiles nothing after a mode like it


def is_bf16(inputs: Sequence[object]) -> bool:
    """Return whether a network computes in bf16, by what it is called with."""
    return any(isinstance(each, Tensor) and each.dtype == torch.bfloat16 for each in inputs)


def timed(step: Callable[[], object], steps: int, device: torch.device) -> dict[str, float]:
    """Return seconds a step: `wall_s` until the device is done, `host_s` until the host is, `cpu_s` of all threads."""
    wait = torch.cuda.synchronize if device.type == "cuda" else int
    wait()
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    host = time.perf_counter() - begun
    wait()
    wall = time.perf_counter() - begun
    return {"wall_s": wall / steps, "host_s": host / steps, "cpu_s": (time.process_time() - cpu) / steps}


@torch.no_grad()
def flops(network: nn.Module, arguments: tuple[Any, Any], trainer: Trainer) -> dict[str, float]:
    """Return FLOPs of a forward pass of one image, and of a step of it, by the rule of this page's head."""
    with FlopCounterMode(display=False) as counter:
        network(*arguments[0], **arguments[1])
    forward = counter.get_total_flops() / len(arguments[0][0])
    passes = 2 + trainer.task.trains_network + bool(getattr(network, "gradient_checkpointing", False))
    return {"forward_tflop": forward / 1e12, "step_tflop": passes * forward / 1e12}


def launches(trainer: Trainer, batches: Sequence[Batch]) -> int | None:
    """Return the kernels that the host launches in a step; None without a GPU."""
    if trainer.world.device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        trainer.train_step(batches)
        torch.cuda.synchronize()
    return sum(each.count for each in profiled.key_averages() if each.key.startswith(("cudaLaunch", "cuLaunch")))


def peak_gib(device: torch.device) -> float:
    """Return the most memory that was allocated on the device, or that this process held on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def table(overrides: Sequence[str], found: dict[str, Any], tflops: float | None) -> str:
    """Return the measurement as a line of a table under its head."""

    def median(rows: str, name: str) -> float:
        return statistics.median(row[name] for row in found[rows])

    computed = found.get("computed_bytes")
    wall, images, clock = median("step", "wall_s"), found["images"], "cpu_s" if tflops is None else "wall_s"
    mfu = "" if tflops is None else f"{images * found['step_tflop'] / wall / tflops:.1%}"
    pairs = zip(found.get("loop", ()), found.get("peer", ()), strict=True)
    ratios = [theirs[clock] / ours[clock] for ours, theirs in pairs]
    compared = f"{statistics.median(ratios):.2f}" if ratios else ""
    cells = {
        "run": f"`{' '.join(overrides)}`",
        "images/s": f"{images / wall:.1f}",
        "MFU": mfu,
        "step, ms": f"{wall * 1e3:.0f}",
        "host, ms": f"{median('step', 'host_s') * 1e3:.0f}",
        "launches": f"{found['launches'] or ''}",
        "peak, GiB": f"{found['peak_gib']:.1f}",
        "peak / computed": f"{found['peak_gib'] * 2**30 / computed:.3f}" if computed else "",
        "first step, s": f"{found['first_step_s']:.1f}",
        "original / ours": compared,
    }
    return "\n".join(f"| {' | '.join(line)} |" for line in (cells, ["---"] * len(cells), cells.values()))


def main() -> int:
    """Run, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", type=Path, help="a checkout of the original")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="+")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    choose = strategies.choose

    def noted(cfg: DictConfig, budget: Budget) -> strategies.Choice:
        choice = choose(cfg, budget)
        if budget.on_cuda:
            # without what torch's allocator does not count; later choices are those that a warning proposes
            found.setdefault("computed_bytes", choice.bytes - CONTEXT_BYTES)
        return choice

    strategies.choose = noted

    def instead(trainer: Trainer) -> None:
        found.update(
            measure(trainer, args.warmup, args.steps, args.rounds, args.peer), images=trainer.global_batch_size
        )
        trainer.stopped = "Measured."  # nothing is exported

    Trainer.run = instead  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        code = launch([*QUIET, f"run.dir={folder}/run", "train.max_steps=1000000", *args.overrides])
    if "step" not in found:
        return code
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    peak = next((value for part, value in DENSE_BF16_TFLOPS.items() if part in name), None)
    facts = {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}", "device": name, "torch": torch.__version__}
    facts |= {"threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    sys.stdout.write(f"{json.dumps(facts)}\n\n{table(args.overrides, found, peak)}\n")
    if args.out is not None:
        args.out.write_text(json.dumps({**facts, "overrides": args.overrides, **found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
