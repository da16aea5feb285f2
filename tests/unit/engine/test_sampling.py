"""Grids of samples: where they are written, and what happens where they cannot be."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from cascade_train.distributed.process_group import World
from cascade_train.engine.sampling import CELL_PX, LABEL_PX, SampleGrid, SampleSpec, compose_grid

CAPTIONS = ("a cat", "w" * 10**6)


@pytest.fixture
def grid(world: World, tmp_path: Path) -> SampleGrid:
    image_sampler: Any = SimpleNamespace(
        result="sample", sample=lambda captions, *_: torch.rand(len(captions), 3, 8, 8)
    )
    spec = SampleSpec(captions=CAPTIONS, image_BCHW=None, seed=0)
    (tmp_path / "run").mkdir()
    return SampleGrid(
        phases=[], image_sampler=image_sampler, spec=spec, world=world, directory=tmp_path / "run" / "samples"
    )


def test_a_grid_lies_in_a_folder_of_its_step(grid: SampleGrid) -> None:
    assert grid.draw(3) == [grid.directory / "step_3" / "grid.png"]
    names = ["00_sample.png", "01_sample.png", "grid.png"]
    assert sorted(path.name for path in (grid.directory / "step_3").iterdir()) == names


def test_a_picture_carries_its_caption(grid: SampleGrid) -> None:
    grid.draw(3)
    captions = []
    for row in range(2):
        with Image.open(grid.directory / f"step_3/0{row}_sample.png") as picture:
            captions.append(picture.info["caption"])
    assert captions[0] == "a cat"
    assert captions[1].startswith("w" * 500)
    assert len(captions[1]) < 1100


def test_originals_are_files_of_the_first_grid_alone(grid: SampleGrid) -> None:
    grid.spec = dataclasses.replace(grid.spec, image_BCHW=torch.zeros(2, 3, 8, 8))
    grid.image_sampler = SimpleNamespace(
        **vars(grid.image_sampler), beside=lambda *_: {"control": torch.ones(2, 3, 8, 8)}
    )
    (first,), (second,) = grid.draw(0), grid.draw(3)
    results = ["00_sample.png", "01_sample.png"]
    originals = ["00_original.png", "01_original.png"]
    assert sorted(path.name for path in first.parent.glob("0*.png")) == sorted([*originals, *results])
    assert sorted(path.name for path in second.parent.glob("0*.png")) == results


def test_a_grid_that_does_not_fit_on_the_disk_stops_nothing(
    grid: SampleGrid, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(image: Image.Image, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    assert grid.draw(3) == []
    assert "No space left on device" in caplog.text
    assert "GiB are free there). The run goes on without this grid." in caplog.text
    assert not (grid.directory / "step_3").exists()


def test_a_run_folder_that_was_removed_is_not_made_again(grid: SampleGrid, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(grid.directory.parent)
    assert grid.draw(3) == []
    assert "The run goes on without this grid." in caplog.text
    assert not grid.directory.parent.exists()


@pytest.mark.parametrize("size", [(400, 1), (1, 400), (8, 8), (400, 300)])
def test_a_cell_shows_images_of_any_aspect_ratio(size: tuple[int, int]) -> None:
    grid = compose_grid(["a line"], {"sample": [Image.new("RGB", size, "black")]})
    cell = grid.crop((LABEL_PX, 24, LABEL_PX + CELL_PX, 24 + CELL_PX)).convert("L").point(lambda value: 255 - value)
    left, top, right, bottom = cell.getbbox()
    longest = max(size)
    assert (right - left, bottom - top) == tuple(max(1, round(side * (CELL_PX - 4) / longest)) for side in size)
