"""Units that repeat others are left out of a rehearsal, and all is computed as if they had run."""

from __future__ import annotations

from typing import Any

import pytest

from cascade_train.assembly.components import build_parts
from cascade_train.assembly.planning import memory
from cascade_train.assembly.planning.batches import blank_batch
from cascade_train.assembly.planning.live import Live
from cascade_train.assembly.planning.rehearsal import Rehearsed, rehearse, unloaded
from cascade_train.assembly.planning.repeats import Repeats
from tests.unit.config.composing import checked

DEEP = ("model=c_tiny", *(f"model.network.{way}_num_layers_per_block=[6,6]" for way in ("down", "up")))
PARTLY = (
    "model.network.block_types_per_layer=[[SDCascadeResBlock,SDCascadeTimestepBlock],"
    "[SDCascadeResBlock,SDCascadeTimestepBlock,SDCascadeAttnBlock]]"
)
"""One level without attention."""

REPEATED = (
    *("model=b_tiny", "model.network.down_num_layers_per_block=[2]", "model.network.up_num_layers_per_block=[6]"),
    "model.network.up_blocks_repeat_mappers=[3]",
)
COMMON = ("train.precision=bf16", "train.global_batch_size=8")


def rehearsed(*own: str, shortened: bool) -> Rehearsed:
    cfg = unloaded(checked(*own))
    parts = build_parts(cfg)
    return rehearse(cfg, parts, [blank_batch(cfg, parts, size) for size in (2, 3)], shortened=shortened)


@pytest.mark.parametrize(
    ("own", "left_out"),
    [
        ((*DEEP, PARTLY, "task=finetune"), 8),
        ((*DEEP, "task=lora", "activation_checkpointing=true", "task.dropout=0.1"), 8),
        ((*DEEP, "task=controlnet", "task.blocks=[1,20]", "activation_checkpointing=true"), 5),
        ((*REPEATED, "task=reconstruction", "activation_checkpointing=true"), 6),
    ],
)
def test_units_that_are_left_out_live_as_if_they_had_run(
    own: tuple[str, ...], left_out: int, monkeypatch: pytest.MonkeyPatch
):
    repeated, count = Repeats._repeated, []

    def counted(self: Repeats, *arguments: Any) -> Any:
        count.append(1)
        return repeated(self, *arguments)

    monkeypatch.setattr(Repeats, "_repeated", counted)
    short, full = (rehearsed(*own, *COMMON, shortened=shortened) for shortened in (True, False))
    assert len(count) >= left_out
    assert short.flops == full.flops
    for mine, theirs in zip(short.curves, full.curves, strict=True):
        assert {name: curve.tolist() for name, curve in mine.items()} == {n: c.tolist() for n, c in theirs.items()}


def test_where_a_unit_is_not_what_it_was_taken_for_all_units_run(monkeypatch: pytest.MonkeyPatch):
    cfg = checked(*DEEP, "task=finetune", *COMMON)
    known, _ = memory.memory_of(cfg)
    monkeypatch.setattr(Live, "copy_part", lambda *_: None)
    anew, _ = memory.memory_of(cfg)
    assert anew.peak(4) == known.peak(4)
