"""Computed memory is that of real runs on this CPU, and follows from two micro-batches for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils._pytree import tree_iter

from cascade_train.assembly.components import Parts, build_parts
from cascade_train.assembly.planning.allocations import Allocations
from cascade_train.assembly.planning.memory import Memory, between, blank_batch, memory_of
from cascade_train.assembly.planning.memory_trace import (
    AVERAGE,
    BATCH,
    COPIES,
    ENCODERS,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    MemoryTrace,
    trace_steps,
    unloaded,
)
from cascade_train.distributed import parallelize
from cascade_train.engine.loop import Trainer
from cascade_train.tasks.base import StepOutput
from cascade_train.tasks.finetune import Finetune
from cascade_train.tasks.prepared import PreparedBatch
from tests.integration.runs import train
from tests.unit.config.composing import checked

pytestmark = pytest.mark.slow

RUNS = {
    "accumulated": ("task=finetune", "train.micro_batch_size=4", "ema.decay=0.9", "train.precision=bf16"),
    "checkpointed adapters": ("task=lora", "activation_checkpointing=true", "task.train_tokens=[['[new]','^a']]"),
    "stage b": (
        "model=b_tiny",
        "task=reconstruction",
        "optimizer=torch",
        "optimizer.algorithm._target_=torch.optim.SGD",
    ),
}
COMMON = ("data=shapes", "train.global_batch_size=8", "data.num_workers=0")


def holdings(trainer: Trainer) -> list[Tensor]:
    """Return what a run holds between steps."""
    roots = [root for phase in trainer.phases for root in phase.roots]
    modules = [*roots, *trainer.task.stage.frozen_modules().values()]
    found = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    for phase in trainer.phases:
        found += [value for state in phase.optimizer.state.values() for value in tree_iter(state)]
        found += [] if phase.ema is None else phase.ema.state_dict().values()
    wholes = [whole for root in roots if (whole := parallelize._whole(root)) is not None]
    return found + [copy for whole in wholes for *_, copy in whole._slots or ()]


@pytest.mark.parametrize("name", RUNS)
def test_computed_memory_is_that_of_a_real_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, Mapping[str, np.ndarray]] = {}
    train_step = Trainer.train_step

    def looking(self: Trainer, micro_batches: object) -> object:
        if self.step == 0:
            return train_step(self, micro_batches)  # type: ignore[arg-type]
        with Allocations() as allocations:
            allocations.record(holdings(self))
            begin, made = allocations.tick, train_step(self, micro_batches)  # type: ignore[arg-type]
        seen["curves"] = allocations.curves(begin)
        return made

    monkeypatch.setattr(Trainer, "train_step", looking)
    overrides = (*([] if name == "stage b" else ["model=c_tiny"]), *COMMON, *RUNS[name])
    train(tmp_path / "run", *overrides, "train.max_steps=2", "checkpoint.every_steps=null")
    cfg = checked(*overrides)
    micro = cfg.train.micro_batch_size
    memory, _ = memory_of(cfg, on_cuda=False)
    assert memory.total(micro, 8 // micro) == pytest.approx(sum(seen["curves"].values()).max(), rel=0.1)


class Splitting(Finetune):
    """A task of a user's own, which makes more tensors of more samples."""

    def loss(self, prepared: PreparedBatch) -> StepOutput:
        """Return the loss of the samples, each copied by itself."""
        output = super().loss(prepared)
        return replace(output, loss_B=torch.stack([loss.clone() for loss in output.loss_B]))


def traced(cfg: DictConfig, parts: Parts, *sizes: int) -> MemoryTrace:
    cfg = unloaded(cfg)
    return trace_steps(cfg, parts, [blank_batch(cfg, parts, n) for n in sizes], on_cuda=False)


@pytest.mark.parametrize(
    "own",
    [
        ("model=c_tiny", "task=finetune", "train.precision=bf16", "optimizer=muon", "activation_checkpointing=true"),
        ("model=b_tiny", "task=reconstruction", "model.semantic_noise=0.1"),
        ("model=sd_tiny", "task=finetune"),
        ("model=a_tiny", "task=reconstruction"),
    ],
)
def test_two_micro_batches_tell_the_memory_of_others(own: tuple[str, ...]):
    """Also of Stage A, which looks up codes sample by sample, and of SD, which makes tables in its first step."""
    cfg = checked(*own)
    steps = traced(cfg, build_parts(unloaded(cfg)), 2, 3)
    memory = replace(between(steps, sizes=(2, 3)), context=0)
    for size, other in ((1, 4), (16, 32)):
        curves = traced(cfg, build_parts(unloaded(cfg)), size, other).curves[0]
        assert memory.total(size) == pytest.approx(sum(curves.values()).max(), abs=5000)
    assert (steps.update_flops > steps.flops) == ("optimizer=muon" in own), "Muon multiplies matrices once a step"


def test_a_class_of_the_user_s_own_may_go_through_samples_one_by_one():
    parts = build_parts(unloaded(cfg := checked("model=c_tiny", "task=finetune")))
    own = Splitting(**{name: getattr(parts.task, name) for name in ("cond_drop_prob", "image_keep_prob")})
    steps = traced(cfg, replace(parts, task=own), 2, 3)
    assert len({len(operations) for operations in steps.operations}) == 2
    parts = replace(build_parts(unloaded(cfg)), task=own)
    curves = traced(cfg, parts, 8, 9).curves[0]
    memory = replace(between(steps, sizes=(2, 3)), context=0)
    assert memory.total(8) == pytest.approx(sum(curves.values()).max(), abs=5000)


def test_between_two_loops_over_samples_the_peak_counts():
    def of(samples: int) -> tuple[list[str], dict[str, np.ndarray]]:
        loop = ["clone"] * samples
        bytes_T = [1, *[2] * samples, 5 + 10 * samples, *[2] * samples, 3]
        return ["begin", *loop, "stack", *loop, "end"], {GRADIENTS: np.array(bytes_T, dtype=np.int64)}

    operations, curves = zip(*map(of, (2, 3)), strict=True)
    memory = between(SimpleNamespace(operations=operations, curves=curves), sizes=(2, 3))
    assert (memory.fixed[GRADIENTS] + 9 * memory.each[GRADIENTS]).max() == 95


def test_memory_is_what_the_numbers_of_parameters_say():
    memory, steps = memory_of(checked("model=c_tiny", "task=finetune", "train.precision=bf16", "ema.decay=0.9"))
    trained = sum(trains for _, trains in steps.parameters.values())
    peak, waiting = memory.peak(1), memory.peak(1, accumulated=4)
    for name, each in ((WEIGHTS, 4), (COPIES, 2), (OPTIMIZER, 8), (AVERAGE, 4)):
        assert peak[name] == pytest.approx(each * trained, rel=0.03)
    assert waiting[GRADIENTS] == pytest.approx(4 * trained, rel=0.03)
    assert waiting[BATCH] == pytest.approx(2 * peak[BATCH], rel=0.1)
    assert steps.checkpoint_bytes == pytest.approx(16 * trained, rel=0.01)
    split = memory.over(4)
    assert split.peak(1)[OPTIMIZER] == pytest.approx(2 * trained, rel=0.03)
    host, _ = memory_of(checked("model=c_tiny", "task=finetune", "ema.decay=0.9", "ema.device=cpu"))
    assert AVERAGE not in host.peak(1)
    both = ("ema.decay=0.9", "ema.post_hoc=[0.05,0.1]", "checkpoint.keep_last=null")
    three, _ = memory_of(checked("model=c_tiny", "task=finetune", *both))
    assert three.peak(1)[AVERAGE] == pytest.approx(12 * trained, rel=0.03)


def test_state_that_an_optimizer_makes_anew_in_each_step_is_its_own():
    """Two bytes for each trained weight, which several ranks divide."""
    own = ("model=c_tiny", "task=finetune", "train.precision=bf16", "train.master_weights=bf16")
    memory, steps = memory_of(checked(*own, "optimizer=adamw_8bit"))
    trained = sum(trains for _, trains in steps.parameters.values())
    assert memory.fixed[OPTIMIZER][0] >= 2 * trained
    assert memory.over(4).fixed[OPTIMIZER][0] == memory.fixed[OPTIMIZER][0] / 4


@pytest.mark.parametrize("model", ["vae_tiny", "a_tiny"])
def test_what_begins_later_in_a_run_and_files_that_are_not_here_are_counted(model: str):
    own = (f"model={model}", "task=reconstruction", "train.global_batch_size=4")
    never, later, at_once = (
        memory_of(checked(*own, f"objective.adversarial.start_step={step}"))[0].total(4) for step in ("null", 900, 1)
    )
    assert never < later == at_once
    judged, _ = memory_of(
        checked(*own, "objective.perceptual.weights=nowhere.pth", "objective.perceptual.start_step=9")
    )
    features = 4 * 14714688  # the numbers of VGG-16 without its classifier
    assert judged.peak(4)[ENCODERS] - memory_of(checked(*own))[0].peak(4).get(ENCODERS, 0) >= features
    assert judged.total(4) > never + features


@pytest.mark.parametrize(("option", "low", "high"), [("adafactor", 0.5, 3.5), ("prodigy", 16, 16.1)])
def test_optimizers_that_read_a_value_are_traced(option: str, low: float, high: float):
    """Bytes for each trained weight: rows and columns; two moments, the first weights and a sum."""
    memory, steps = memory_of(checked("model=c_tiny", "task=lora", f"optimizer={option}", "lr_scheduler=constant"))
    trained = sum(trains for _, trains in steps.parameters.values())
    assert low <= memory.peak(1)[OPTIMIZER] / trained <= high


def test_the_largest_micro_batch_is_the_last_that_fits():
    curve = np.array([0.0, 10.0])
    memory = Memory(fixed={GRADIENTS: curve, BATCH: curve * 0}, each={GRADIENTS: curve * 0, BATCH: curve}, context=0)
    assert [memory.total(size) for size in (1, 2)] == [20, 30]
    assert [memory.total(1, accumulated=4), memory.total(2, accumulated=2)] == [30, 50]
    assert [memory.total(size, accumulated=1) for size in (3, 4)] == [40, 50]
    assert memory.largest(50, (1, 2, 4), samples=4) == 4
    assert memory.largest(49, (1, 2, 4), samples=4) == 1
    assert memory.largest(49, (1, 2, 3, 4), samples=4) == 3
    assert memory.largest(29, (1, 2, 4), samples=4) is None


def test_fake_kernels_are_put_back():
    kept = torch.nn.functional.dropout
    memory_of(checked("model=c_tiny", "task=lora", "task.dropout=0.1"))
    assert torch.nn.functional.dropout is kept
    assert not torch.distributed.is_initialized()
