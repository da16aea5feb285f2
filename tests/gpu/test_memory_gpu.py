"""Computed memory is what torch's allocator on a CUDA device counts."""

from __future__ import annotations

import pytest
import torch

from cascade_train.assembly.planning.memory import memory_of
from tests.integration.runs import train
from tests.unit.config.composing import checked

pytestmark = pytest.mark.gpu

WIDE = (
    *("model=c_tiny", "model.weights=null", "model.image_size=512", "data=shapes", "data.num_workers=0"),
    *("model.network.block_out_channels=[768,768]", "model.network.num_attention_heads=[12,12]"),
    *("train.global_batch_size=32", "train.max_steps=3", "checkpoint.every_steps=null", "train.precision=bf16"),
)
RUNS = {
    "finetune": ("task=finetune",),
    "checkpointed": ("task=finetune", "activation_checkpointing=true", "ema.decay=0.9"),
    "accumulated": ("task=finetune", "train.micro_batch_size=8"),
    "adapters": ("task=lora", "task.rank=16"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_peak_of_a_step_is_within_a_twentieth_of_the_computed_one(name, tmp_path, monkeypatch):
    from cascade_train.engine.loop import Trainer

    train_step, peaks = Trainer.train_step, []

    def looking(self: Trainer, micro_batches: object) -> object:
        torch.cuda.reset_peak_memory_stats()
        made = train_step(self, micro_batches)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        return made

    monkeypatch.setattr(Trainer, "train_step", looking)
    before = torch.cuda.memory_allocated()  # of tests before, and libraries' workspaces
    train(tmp_path / "run", *WIDE, *RUNS[name])
    cfg = checked(*WIDE, *RUNS[name])
    memory, _ = memory_of(cfg)
    micro = cfg.train.micro_batch_size
    computed = memory.total(micro, 32 // micro) - memory.context
    assert peaks[-1] - before == pytest.approx(computed, rel=0.05)
