"""Judge whether samples of a canny control network follow the edges that they are given.

    python -m cascade_train experiment=tiny_canny
    python bench/control_edges.py --run runs/tiny_canny

The number is the correlation of a sample's own edges with its map, both summed over cells, beside the correlation with
the maps of the other samples, and beside what the same noise gives at strength 0.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cascade_train.data.shapes import Shapes
from cascade_train.filters.canny import CannyFilter
from cascade_train.results.find import find_model
from cascade_train.results.paint import PromptBatch, fit_sizes
from cascade_train.results.paint import paint as paint_orders
from cascade_train.tasks.base import Guide

CELL_PX = 16
"""Side of a cell: the tiny previewer shows nothing finer."""


def pictures(count: int, only: list[str] | None = None) -> Tensor:
    """Return shapes (B, 3, 96, 96) uint8 that no run has seen, of the words in `only`; None = of all."""
    options = {"crop": "center", "shuffle_window_shards": 1, "num_workers": 0, "worker_start": "fork"}
    source = Shapes(image_size=96, samples=count, seed=77, only=only, **options)
    source.open()
    return torch.stack([torch.from_numpy(source.read(row).image.transpose(2, 0, 1).copy()) for row in range(count)])


def paint(run: Path, image_BCHW: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Return the maps (B, 1, H, W) of pictures and samples (B, 3, H, W) under them, without a caption's help."""
    canny = CannyFilter(resize=None, low=100, high=200)
    maps = np.stack([canny.apply(image.numpy(), torch.Generator()) for image in image_BCHW])
    numbers = tuple(range(len(image_BCHW)))
    guide = Guide(image_BCHW=image_BCHW, is_map=False, strength=strength, numbers=numbers)
    order = PromptBatch(captions=("a shape",) * len(numbers), numbers=numbers, guide=guide)
    model = find_model(str(run), key="run", part="prior")
    sizes = fit_sizes(model, None, height=None, width=None, compression=None)
    images = paint_orders(model, None, [order], sizes=sizes, seed=0)
    samples = np.stack([np.asarray(image).transpose(2, 0, 1) for image in images])
    return torch.from_numpy(maps) / 255, torch.from_numpy(samples) / 255


def correlations(map_B1HW: Tensor, sample_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's correlation (B,) of its edges with its own map, and the mean with the maps of the others."""
    grey_B1HW = sample_BCHW.mean(dim=1, keepdim=True)
    down, across = (grey_B1HW.diff(dim=axis).abs() for axis in (-2, -1))
    found = functional.pad(down, (0, 0, 0, 1)) + functional.pad(across, (0, 1))
    cells = (functional.avg_pool2d(each, CELL_PX).flatten(1) for each in (found, map_B1HW))
    found_BN, wanted_BN = (functional.normalize(each - each.mean(dim=1, keepdim=True)) for each in cells)
    table_BB = found_BN @ wanted_BN.T
    own_B = table_BB.diag()
    return own_B, (table_BB.sum(dim=1) - own_B) / (len(own_B) - 1)


def margin(map_B1HW: Tensor, sample_BCHW: Tensor) -> tuple[float, float]:
    """Return by how much samples agree more with their own maps than with the others', and its standard error."""
    own_B, others_B = correlations(map_B1HW, sample_BCHW)
    more_B = own_B - others_B
    return more_B.mean().item(), more_B.std().item() / len(more_B) ** 0.5


def main() -> int:
    """Print the agreement at strength 1 and 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--count", type=int, default=24)
    given = parser.parse_args()
    image_BCHW = pictures(given.count)
    for strength in (1.0, 0.0):
        maps, samples = paint(given.run, image_BCHW, strength)
        own_B, others_B = correlations(maps, samples)
        more, error = margin(maps, samples)
        print(
            f"strength {strength:g}: {own_B.mean():.3f} with its own map, {others_B.mean():.3f} with the others', "
            f"{more:.3f} +- {error:.3f} more with its own"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
