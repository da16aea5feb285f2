"""Samples of a control network follow the edges that they are given, and only where the control is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.control_edges import margin, paint, pictures
from tests.integration.runs import train

WORDS = ["square", "white", "large", "left", "right", "top", "bottom"]
"""Few kinds of pictures, which a network learns in few steps; backgrounds are of any colour."""

SHORT = (
    *("data=shapes", f"data.only=[{','.join(WORDS)}]", "train.global_batch_size=8", "lr_scheduler.warmup_steps=10"),
    *("checkpoint.every_steps=null", "sample.every_steps=null", "run.seed=0"),
)
CANNY = (
    "experiment=tiny_canny",
    "train.max_steps=90",
    "optimizer.lr=5e-3",
    "task.cond_drop_prob=1",
    "sample.steps=10",
)


@pytest.mark.slow
def test_samples_follow_the_edges_that_they_are_given(tmp_path: Path) -> None:
    run = train(tmp_path / "control", *SHORT, *CANNY)
    image_BCHW = pictures(48, WORDS)
    followed, error = margin(*paint(run, image_BCHW, 1.0))
    assert followed > 0.1
    assert followed > 6 * error, "more than chance"
    ignored, error = margin(*paint(run, image_BCHW, 0.0))
    assert abs(ignored) < 3 * error
    assert abs(ignored) < followed / 3
