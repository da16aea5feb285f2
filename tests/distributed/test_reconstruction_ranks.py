"""Reconstructions of held-out pictures are measured alike on one rank and on two, whatever the batch."""

import pytest

from tests.distributed.test_modes import B_NARROW, fork
from tests.integration.runs import read_metrics

pytestmark = pytest.mark.distributed

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
