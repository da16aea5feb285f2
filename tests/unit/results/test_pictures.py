"""Real pictures are read from folders, tables and tars alike, numbered, and the same each time."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch

from cascade_train.errors import ConfigError, RunError
from cascade_train.results.evaluation.pictures import open_originals
from tests.unit.config.composing import checked
from tests.unit.data import tars

NAMES = ["a red square", "a blue square", "a green square"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in a folder, and a csv and a tar of the same ones beside it."""
    place = tmp_path_factory.mktemp("originals")
    (place / "pictures").mkdir()
    for tint, name in enumerate(NAMES):
        (place / "pictures" / f"{name}.jpg").write_bytes(tars.picture(tint=40 * tint))
        (place / "pictures" / f"{name}.txt").write_text(name)
    rows = [f"pictures/{name}.jpg,{name}" for name in sorted(NAMES)]
    (place / "table.csv").write_text("\n".join(["image,caption", *rows]))
    with tarfile.open(place / "all.tar", "w") as tar:
        for number, name in enumerate(sorted(NAMES)):
            for ending in ("jpg", "txt"):
                tar.add(place / "pictures" / f"{name}.{ending}", arcname=f"{number}.{ending}")
    return place


def test_folder_table_and_tars_hold_the_same_pictures(folder: Path) -> None:
    cfg = checked("model=c_tiny", "task=finetune")
    opened = [open_originals(cfg, [str(folder / name)]) for name in ("pictures", "table.csv", "all.tar")]
    for each in opened:
        assert len(each) == 3
        assert each.captions() == sorted(NAMES)
        assert each.batches(2) == [(0, 1), (2,)]
        read = each.read((0, 2))
        assert read.captions == (sorted(NAMES)[0], sorted(NAMES)[2])
        assert read.image_BCHW is not None
        assert read.image_BCHW.shape == (2, 3, cfg.model.image_size, cfg.model.image_size)
        assert torch.equal(read.image_BCHW, opened[0].read((0, 2)).image_BCHW)
    assert len(opened[0].first(2, seed=0)) == 2


def test_what_the_run_held_out_is_taken_where_nothing_is_named() -> None:
    data = ("model=c_tiny", "task=finetune", "data.samples=30")
    found = open_originals(checked(*data, "validate.share=0.2"), [])
    assert 1 <= len(found) < 15
    with pytest.raises(ConfigError, match="real=null: held out no pictures .validate.share.. Name a folder, a table"):
        open_originals(checked(*data), [])
    with pytest.raises(ConfigError, match="real=nowhere: data.path=nowhere is not a folder"):
        open_originals(checked(*data), ["nowhere"])


def test_a_damaged_picture_is_named(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    content = (folder / "pictures" / f"{NAMES[0]}.jpg").read_bytes()
    (broken / "half.jpg").write_bytes(content[: len(content) // 3])
    (broken / "whole.jpg").write_bytes(content)
    found = open_originals(checked("model=c_tiny", "task=finetune"), [str(broken)])
    with pytest.raises(
        RunError, match=r"broken: sample broken:half\.jpg: OSError: image file is truncated\. Mend or remove it\.$"
    ):
        found.read((0, 1))
