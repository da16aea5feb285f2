"""The grid of an evaluation: a row for each prompt, its pictures side by side, before them what they follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image

from cascade_train.engine.checkpoint.folder import EVALUATIONS, Manifest, evaluations, write_manifest
from cascade_train.engine.run.report import notes
from cascade_train.engine.sampling import CELL_PX, LABEL_PX
from cascade_train.results.evaluation import result as results
from cascade_train.results.evaluation.pictures import Folder
from cascade_train.results.evaluation.result import GRID, METRICS, Evaluation, keep


def result_of(**changes: Any) -> Evaluation:
    """An evaluation with one number."""
    given: dict[str, Any] = {
        **{"origin": "from=runs/x", "images": 1, "real": None, "real_images": 0, "networks": {}, "settings": {}},
        **{"measures": {"psnr": 20.0}, "weights": "w", "captions": (), "count": 1, "originals": None},
    }
    return Evaluation(**given | changes)


def test_numbers_follow_a_line_that_a_crash_has_torn(tmp_path: Path) -> None:
    lines, whole = tmp_path / EVALUATIONS, json.dumps({"step": 2, "weights": "w"}) + "\n"
    lines.write_text(whole + '{"step": 4, "evalua')
    for step in (4, 6):
        keep(result_of(), tmp_path, step, tmp_path / GRID, track=False, is_main=True)
    assert lines.read_text().startswith(whole)
    assert len(lines.read_text().splitlines()) == 4
    assert evaluations(lines, {4: "w"})[4] == {"evaluate/psnr": 20.0}


def test_numbers_go_to_the_tracked_run_of_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that began without a tracker."""
    tracker = "tracker: {name: wandb, project: p, entity: null, mode: offline}"
    (tmp_path / "config.yaml").write_text(f"{tracker}\nrun: {{name: r}}\n")
    for step, run_id in ((2, None), (4, "the-id")):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        write_manifest(folder, Manifest(step=step, files={}, facts={"tracker_run_id": run_id}))
    build = MagicMock()
    monkeypatch.setattr(results, "build_tracker", build)
    keep(result_of(), tmp_path, 2, tmp_path / GRID, track=True, is_main=True)
    assert build.call_args.kwargs["run_id"] == "the-id"
    build.return_value.log.assert_called_once_with({"evaluate/psnr": 20.0}, 2)


def shown(folder: Path, *, prompts: int, count: int, follows: bool) -> list[list[int]]:
    """Write the grid of grey pictures, 10 times their number, originals 5 more; return the greys of its cells."""
    (folder / "pictures").mkdir(parents=True)
    for number in range(prompts * count):
        Image.new("RGB", (64, 64), (10 * number,) * 3).save(Folder(folder).picture(number))
    result = result_of(
        images=prompts * count,
        measures={"psnr": float("inf")},
        captions=tuple(f"prompt {number // count}" for number in range(prompts * count)),
        count=count,
        originals=(lambda batch: [torch.full((3, 64, 64), 10 * batch[0] + 5, dtype=torch.uint8)]) if follows else None,
    )
    result.write(folder)
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
    assert (results.ROWS, results.COLUMNS) == (12, 8)
    monkeypatch.setattr(results, "ROWS", 1)
    monkeypatch.setattr(results, "COLUMNS", 2)
    assert shown(tmp_path / "cut", prompts=2, count=3, follows=False) == [[0, 10]]


@pytest.mark.parametrize(
    ("name", "images", "real", "words"),
    [
        ("fid", 20, 47, "fid of 20 images against 47 real ones is too large"),
        ("rfid", 10_000, 9_999, "rfid of 10,000 images against 9,999 real ones is too large"),
        ("fid", 10_000, 10_000, None),
        ("clip_score", 20, 0, None),
    ],
)
def test_few_pictures_are_cautioned_against_wherever_their_fid_is_shown(
    tmp_path: Path, name: str, images: int, real: int, words: str | None
) -> None:
    networks = {"clip": "c", "features": "f", "resize": "clean"}
    result = result_of(images=images, real="photos", real_images=real, networks=networks, measures={name: 90.0})
    keep(result, tmp_path, 4, tmp_path / GRID, track=False, is_main=True)
    page = [note["text"] for note in notes(tmp_path, {}) if note["warning"]]
    if words is None:
        assert result.plain()["caution"] is None
        assert len(result.table().splitlines()) == 2
        assert page == []
        return
    assert result.plain()["caution"].startswith(words)
    assert result.table().splitlines()[-1].startswith(words)
    assert page[0].startswith(f"Evaluation of step 4: {words}")
