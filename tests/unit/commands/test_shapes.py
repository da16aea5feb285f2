from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch

from cascade_train.__main__ import launch
from tests.unit.data import tars
from tests.unit.data.dataset_contract import loading
from tests.unit.data.test_shapes import shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shapes") / "new" / "tars"
    words = ["samples=25", "samples_per_shard=10", "image_size=32", "seed=0"]
    assert launch(["shapes", f"out={out}", *words]) == 0
    return out


def test_tars_have_the_webdataset_layout(folder: Path) -> None:
    assert [path.name for path in sorted(folder.iterdir())] == [f"shapes-{i:06d}.tar" for i in range(3)]
    with tarfile.open(folder / "shapes-000002.tar") as tar:
        names = tar.getnames()
        scene = json.loads(tar.extractfile("0000020.json").read())  # type: ignore[union-attr]
    assert sorted(names[:3]) == ["0000020.json", "0000020.png", "0000020.txt"]
    assert len(names) == 15
    assert set(scene) == {"colour", "shape", "size", "position", "background"}


def test_tars_hold_the_pictures_of_the_source(folder: Path) -> None:
    source = shapes(samples=25)
    options = {"image_size": 32, "index_dir": str(folder.parent / "index")}
    with loading(tars.webdataset(folder / "shapes-{000000..000002}.tar", **options)) as loader:
        for _ in range(4):
            for micro in next(loader):
                for image, caption, row in zip(micro.image_BCHW, micro.captions, micro.index_B.tolist(), strict=True):
                    drawn = source.read(row)
                    assert torch.equal(image, torch.tensor(drawn.image).permute(2, 0, 1))
                    assert caption == drawn.caption


def test_the_same_arguments_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    assert launch(["shapes", f"out={tmp_path}", "samples=10", "image_size=32", "samples_per_shard=10"]) == 0
    assert (tmp_path / "shapes-000000.tar").read_bytes() == (folder / "shapes-000000.tar").read_bytes()


def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "shapes-000000.tar").stat()
    assert launch(["shapes", f"out={folder}", "samples=5"]) == 2
    assert "holds shapes-*.tar" in capsys.readouterr().err
    assert (folder / "shapes-000000.tar").stat() == before
