"""Samples of a control network follow the edges that they are given, and only where the control is on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cascade_train.data.shapes import Shapes
from cascade_train.distributed.process_group import process_group
from cascade_train.filters.canny import CannyFilter
from cascade_train.results.find import find_model
from cascade_train.results.sampling import PromptBatch, fit_sizes, sample_images
from cascade_train.tasks.base import Guide
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


CELL_PX = 16
"""Side of a cell: the tiny previewer shows nothing finer."""


def pictures(count: int, only: list[str] | None = None) -> Tensor:
    """shapes (B, 3, 96, 96) uint8 that no run has seen, of the words in `only`; None = of all."""
    options = {"crop": "center", "shuffle_window_shards": 1, "num_workers": 0, "worker_start": "fork"}
    source = Shapes(image_size=96, samples=count, seed=77, only=only, **options)
    source.open()
    return torch.stack([torch.from_numpy(source.read(row).image.transpose(2, 0, 1).copy()) for row in range(count)])


def sample(run: Path, image_BCHW: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """the maps (B, 1, H, W) of pictures and samples (B, 3, H, W) under them, without a caption's help."""
    canny = CannyFilter(resize=None, low=100, high=200)
    maps = np.stack([canny.apply(image.numpy(), torch.Generator()) for image in image_BCHW])
    numbers = tuple(range(len(image_BCHW)))
    guide = Guide(image_BCHW=image_BCHW, is_map=False, strength=strength, numbers=numbers)
    order = PromptBatch(captions=("a shape",) * len(numbers), numbers=numbers, guide=guide)
    model = find_model(str(run), key="run", part="prior")
    sizes = fit_sizes(model, None, height=None, width=None, compression=None)
    samples: list[Tensor] = []
    with process_group() as world:
        sample_images(model, None, [order], lambda _, images: samples.append(images), sizes=sizes, seed=0, world=world)
    return torch.from_numpy(maps) / 255, samples[0].cpu()


def correlations(map_B1HW: Tensor, sample_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """each sample's correlation (B,) of its edges with its own map, and the mean with the maps of the others."""
    grey_B1HW = sample_BCHW.mean(dim=1, keepdim=True)
    down, across = (grey_B1HW.diff(dim=axis).abs() for axis in (-2, -1))
    found = functional.pad(down, (0, 0, 0, 1)) + functional.pad(across, (0, 1))
    cells = (functional.avg_pool2d(each, CELL_PX).flatten(1) for each in (found, map_B1HW))
    found_BN, wanted_BN = (functional.normalize(each - each.mean(dim=1, keepdim=True)) for each in cells)
    table_BB = found_BN @ wanted_BN.T
    own_B = table_BB.diag()
    return own_B, (table_BB.sum(dim=1) - own_B) / (len(own_B) - 1)


def margin(map_B1HW: Tensor, sample_BCHW: Tensor) -> tuple[float, float]:
    """by how much samples agree more with their own maps than with the others', and its standard error."""
    own_B, others_B = correlations(map_B1HW, sample_BCHW)
    more_B = own_B - others_B
    return more_B.mean().item(), more_B.std().item() / len(more_B) ** 0.5


@pytest.mark.slow
def test_samples_follow_the_edges_that_they_are_given(tmp_path: Path) -> None:
    run = train(tmp_path / "control", *SHORT, *CANNY)
    image_BCHW = pictures(48, WORDS)
    followed, error = margin(*sample(run, image_BCHW, 1.0))
    assert followed > 0.1
    assert followed > 6 * error, "more than chance"
    ignored, error = margin(*sample(run, image_BCHW, 0.0))
    assert abs(ignored) < 3 * error
    assert abs(ignored) < followed / 3
