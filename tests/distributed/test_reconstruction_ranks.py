"""Reconstructions of held-out pictures are measured alike on one rank and on two, whatever the batch."""

import pytest

from tests.distributed.test_modes import B_NARROW, fork, notes
from tests.integration.runs import read_metrics

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MEASURED = (
    *B_NARROW,
    "model=b_tiny",
    "task=reconstruction",
    "train.global_batch_size=4",
    "train.max_steps=1",
    "sample.steps=2",
    "validate.every_steps=1",
    "validate.share=0.02",
    "validate.samples=2",
    "validate.logsnr=[0]",
    "validate.reconstructions=3",
    "ema.decay=0.9",
)
COMPRESSING = (
    *(*B_NARROW, "model=b_tiny", "task=reconstruction", "task.train_compressor=true", "ema.decay=null"),
    *("model.semantic_compressor.weights=null", "model.image_size=128", "model.shrink_range=[0.25,1.0]"),
    *("train.global_batch_size=4", "train.max_steps=3", "checkpoint.every_steps=null"),
)
RUNS = {"one": (1, None, MEASURED), "two": (2, None, (*MEASURED, "parallel=fsdp", "train.micro_batch_size=2"))}


def test_three_pictures_are_measured_alike_on_one_rank_and_two(tmp_path):
    runs = fork(tmp_path, RUNS)
    one, two = (read_metrics(runs / name)[-1] for name in RUNS)
    names = [f"{kind}/{name}" for kind in ("validate", "validate_ema") for name in ("psnr", "ssim", "psnr_bilinear")]
    assert set(names) <= one.keys()
    for name in names:
        assert one[name] == pytest.approx(two[name], rel=1e-3)
    assert one["validate/psnr_bilinear"] == one["validate_ema/psnr_bilinear"] > 10
    assert 0 < one["validate/psnr"] < one["validate/psnr_bilinear"], "one step teaches nothing"


def test_a_compressor_trains_where_ranks_call_it_differently_often(tmp_path):
    """The pictures of a rank shrink to one size or two, and each call gathers what is gathered by itself."""
    split = ("parallel=fsdp", "train.micro_batch_size=2")
    runs = fork(tmp_path, {"one": (1, None, COMPRESSING), "two": (2, "count_calls", (*COMPRESSING, *split))})
    first, second = notes(runs, "two")
    assert len(first) != len(second)
    for one, two in zip(*(read_metrics(runs / name) for name in ("one", "two")), strict=True):
        assert one == pytest.approx(two, rel=1e-4)
