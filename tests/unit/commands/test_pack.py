"""A folder of pictures as tars: the same bytes each time, nothing half, everything read back."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cascade_train.__main__ import launch
from cascade_train.data.tar import packing
from tests.unit.data import tars
from tests.unit.data.test_folder import write


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pack") / "my.pictures"
    write(root / "a cat_(1).png", tars.picture(tint=1))
    write(root / "b.v2.jpg", tars.picture(kind="jpeg", tint=2))
    write(root / "b.v2.txt", "two lines\nof text")
    write(root / "b_v2.png", tars.picture(tint=3))
    write(root / "b_v2.json", '{"artist": "Ann"}')
    write(root / "b_v2.mask.png", tars.picture(tint=4))
    write(root / "sub.folder/ü 犬.bmp", tars.picture(kind="bmp", tint=5))
    write(root / "sub.folder/photo.jfif", tars.picture(kind="jpeg", tint=6))
    write(root / "sub.folder/multiply.txt", "3")
    write(root / "cut.png", tars.picture(tint=7)[:90])
    write(root / "lost.png", b"no picture")
    write(root / "odd.png", tars.picture(tint=8))
    write(root / "odd.json", "[")
    return root


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_tars_hold_the_pictures_with_all_that_lies_beside_them(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "tars"
    assert launch(["pack", f"folder={pictures}", f"out={out}", "samples_per_shard=2"]) == 0
    assert [path.name for path in sorted(out.iterdir())] == [f"my_pictures-00000{n}.tar" for n in range(3)]
    first, second, third = (members(path) for path in sorted(out.iterdir()))
    assert list(first) == [f"{stem}.{end}" for stem, image in (("a cat_(1)", "png"), ("b_v2", "jpg"))
                           for end in sorted(("json", image, "txt"))]  # fmt: skip
    assert first["b_v2.txt"] == b"two lines\nof text"
    assert first["a cat_(1).png"] == (pictures / "a cat_(1).png").read_bytes()
    assert json.loads(first["b_v2.json"]) == {"path": "b.v2.jpg"}
    assert json.loads(second["b_v2-2.json"]) == {"path": "b_v2.png", "artist": "Ann"}
    assert second["b_v2-2.mask.png"] == (pictures / "b_v2.mask.png").read_bytes()
    assert "sub.folder/photo.jpg" in second
    drawn = Image.open(io.BytesIO(third["sub.folder/ü 犬.png"]))
    assert np.array_equal(np.asarray(drawn), np.asarray(Image.open(pictures / "sub.folder/ü 犬.bmp")))
    told = capsys.readouterr().out
    assert "left out cut.png: " in told
    assert "left out lost.png: not a picture of a known format" in told
    assert "left out odd.png: its json is damaged" in told
    assert "5 samples lie in 3 tars, read back and compared; 3 pictures were left out" in told
    assert f"""data=webdataset 'data.urls="{out}/my_pictures-{{000000..000002}}.tar"'""" in told


def test_the_same_folder_gives_the_same_bytes_and_a_seed_another_order(pictures: Path, tmp_path: Path) -> None:
    for out, more in (("a", []), ("b", []), ("c", ["seed=3"]), ("d", ["seed=3"])):
        assert launch(["pack", f"folder={pictures}", f"out={tmp_path / out}", "name=set", *more]) == 0
    a, b, c, d = (digests(tmp_path / name) for name in "abcd")
    assert list(a) == ["set-000000.tar"]
    assert a == b != c == d
    assert sorted(members(tmp_path / "a/set-000000.tar").values()) == sorted(
        members(tmp_path / "c/set-000000.tar").values()
    )


def test_tars_that_are_there_are_left_alone(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "set-000007.tar", b"mine")
    assert launch(["pack", f"folder={pictures}", f"out={tmp_path / 'more'}", "name=set-b"]) == 0
    assert launch(["pack", f"folder={pictures}", f"out={tmp_path / 'more'}", "name=set"]) == 0, "another name"
    assert launch(["pack", f"folder={pictures}", f"out={tmp_path}", "name=set"]) == 2
    assert launch(["pack", f"folder={tmp_path / 'none'}", f"out={tmp_path / 'new/deep'}"]) == 2
    assert not (tmp_path / "new").exists()
    assert "holds set-*.tar: choose another folder or name, or replace by overwrite=true" in capsys.readouterr().err
    assert launch(["pack", f"folder={pictures}", f"out={tmp_path}", "name=set", "overwrite=true"]) == 2
    assert "set-000007.tar would stay beside 1 new tars; remove it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("*.tar")] == ["set-000007.tar"]
    assert launch(["pack", f"folder={pictures}", f"out={tmp_path / 'more'}", "name=set", "overwrite=true"]) == 0


def test_what_reads_back_differently_never_counts(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = packing.write_tar

    def forgetful(path: Path, samples: object) -> Path:
        kept = [sample for sample in samples if "cat" not in sample["__key__"]]  # type: ignore[attr-defined]
        return written(path, kept)

    write(tmp_path / "out/.packing-set/left-over.tar", b"of a run that was killed")
    monkeypatch.setattr(packing, "write_tar", forgetful)
    assert launch(["pack", f"folder={pictures}", f"out={tmp_path / 'out'}", "name=set"]) == 1
    assert "1 of 5 samples read back differently, such as a cat_(1): try again" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_factor_below_one_leaves_no_picture_out(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / f"root/half/{number}.png", tars.picture(tint=number))
        write(tmp_path / f"root/none/{number}.png", tars.picture(tint=number))
    write(tmp_path / "root/half/multiply.txt", "0.4")
    write(tmp_path / "root/none/multiply.txt", "0")
    assert launch(["pack", f"folder={tmp_path / 'root'}", f"out={tmp_path / 'out'}"]) == 0
    (tar,) = (tmp_path / "out").iterdir()
    assert [name for name in members(tar) if name.endswith(".png")] == [f"half/{number}.png" for number in range(5)]
