"""What `cascade-train plan` computes for weights that are split is what a rank of FSDP2 holds."""

import math

import pytest

from cascade_train.assembly.planning import memory
from cascade_train.assembly.planning.memory import memory_of, over_ranks
from cascade_train.distributed import sharded
from cascade_train.distributed.sharded import SPLITS_CODES
from tests.distributed.test_modes import fork, notes
from tests.unit.config.composing import checked

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WIDE = (
    *("model=c_tiny", "model.weights=null", "data.num_workers=0", "model.text_encoder.num_hidden_layers=1"),
    *("model.network.block_out_channels=[128,128]", "model.network.num_attention_heads=[2,2]", "task=finetune"),
    *("train.global_batch_size=8", "parallel=fsdp"),
)
RUNS = {
    "fp32": (),
    "bf16": ("train.precision=bf16",),
    "accumulated": ("train.precision=bf16", "train.micro_batch_size=2", "activation_checkpointing=true"),
    "at_once": (),
    "at_once_bf16": ("train.precision=bf16",),
    "kept": ("train.precision=bf16", "parallel.reshard_after_forward=false"),
    "adapters": ("train.precision=bf16", "task=lora"),
    **({"adapters on codes": ("train.precision=bf16", "task=lora", "train.base_weights=int8")} if SPLITS_CODES else {}),
    "whole in bf16": ("train.precision=bf16", "train.master_weights=bf16", "parallel=ddp"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    more = ("train.max_steps=2", "checkpoint.every_steps=null")
    hooks = {
        name: "gather_at_once memory_hooks.note_peak" if "at_once" in name else "memory_hooks.note_peak"
        for name in RUNS
    }
    starts = {name: (2, hooks[name], (*WIDE, *own, *more)) for name, own in RUNS.items()}
    return fork(tmp_path_factory.mktemp("plan"), starts)


@pytest.mark.parametrize("name", RUNS)
def test_the_peak_of_a_split_step_is_within_a_tenth_of_the_computed_one(runs, name, monkeypatch):
    if "at_once" not in name:
        monkeypatch.setattr(sharded, "GATHERED_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(memory, "_TRACED", {})
    cfg = checked(*WIDE, *RUNS[name], ranks=2)
    whole, _ = memory_of(cfg, on_cuda=False)
    micro = cfg.train.micro_batch_size
    computed = over_ranks(cfg, whole, 2, machine_ranks=2, device_gb=math.inf).total(micro, 4 // micro)
    peaks = notes(runs, name)
    assert len(peaks) == 2
    assert peaks == pytest.approx([computed, computed], rel=0.1)
