"""The grid of an evaluation: a row for each prompt, its pictures side by side, before them what they follow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cascade_train.engine.sampling import CELL_PX, LABEL_PX
from cascade_train.results.evaluation import verdict
from cascade_train.results.evaluation.pictures import Folder
from cascade_train.results.evaluation.verdict import GRID, METRICS, Verdict


def shown(folder: Path, *, prompts: int, count: int, follows: bool) -> list[list[int]]:
    """Write the grid of grey pictures, 10 times their number, originals 5 more; return the greys of its cells."""
    Folder(folder).make()
    for number in range(prompts * count):
        Image.new("RGB", (64, 64), (10 * number,) * 3).save(Folder(folder).picture(number))
    found = Verdict(
        origin="from=runs/x",
        images=prompts * count,
        real=None,
        real_images=0,
        networks={},
        measures={"psnr": float("inf")},
        settings="",
        weights="",
        captions=tuple(f"prompt {number // count}" for number in range(prompts * count)),
        count=count,
        originals=(lambda batch: [torch.full((3, 64, 64), 10 * batch[0] + 5, dtype=torch.uint8)]) if follows else None,
    )
    found.write(folder)
    assert '"psnr": null' in (folder / METRICS).read_text()
    grid = np.asarray(Image.open(folder / GRID))
    rows, columns = (grid.shape[0] - 24) // CELL_PX, (grid.shape[1] - LABEL_PX) // CELL_PX
    middle = CELL_PX // 2
    return [
        [int(grid[24 + CELL_PX * row + middle, LABEL_PX + CELL_PX * column + middle, 0]) for column in range(columns)]
        for row in range(rows)
    ]


def test_a_row_is_a_prompt_and_a_column_a_picture_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(tmp_path / "many", prompts=2, count=3, follows=False) == [[0, 10, 20], [30, 40, 50]]
    assert shown(tmp_path / "one", prompts=3, count=1, follows=True) == [[5, 0], [15, 10], [25, 20]]
    assert (verdict.ROWS, verdict.COLUMNS) == (12, 8)
    monkeypatch.setattr(verdict, "ROWS", 1)
    monkeypatch.setattr(verdict, "COLUMNS", 2)
    assert shown(tmp_path / "cut", prompts=2, count=3, follows=False) == [[0, 10]]
