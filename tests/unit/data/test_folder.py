"""Pictures in folders: what is found, where captions come from, and how often a picture comes."""

from __future__ import annotations

import errno
import json
import logging
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cascade_train.data.captions import Captions
from cascade_train.data.folder import Folder, caption_of_name, find_pictures
from cascade_train.data.index import cache as picture_files
from cascade_train.data.sample import UnreadableSampleError
from cascade_train.errors import ConfigError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import DatasetContract


def folder(path: Path, **options: Any) -> Folder:
    """Make a source with small defaults."""
    return Folder(path=str(path), **{**tars.SMALL, "caption_from": "file_or_name", **options})


def write(path: Path, content: bytes | str | None = None) -> Path:
    """Write a file and its folders; a picture by default."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = tars.picture(tint=len(path.name)) if content is None else content
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def names(source: Folder) -> list[str]:
    return [key.decode() for key in source.open().keys.tolist()]


def captions(source: Folder) -> dict[str, str]:
    index = source.open()
    return {index.keys[row].decode(): source.read(row).caption for row in range(len(index))}


class TestFolder(DatasetContract):
    order_digest = "b646e2e75ce09689"
    samples = 37

    @classmethod
    def make_source(cls, folder_: Path, **options: Any) -> Folder:
        root = folder_ / "pictures"
        if not root.exists():
            for number in range(37):
                write(root / f"{number % 3}/{number:04d}.png", tars.picture(tint=number))
                write(root / f"{number % 3}/{number:04d}.txt", f"picture {number}")
        return folder(root, **options)


def test_pictures_are_found_in_all_folders_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.JPG", "a.png", "Ä.webp", "z/2.bmp", "z/10.jfif", "y/deep/1.jpeg"):
        write(tmp_path / name)
    for name in (".hidden.png", "._a.png", ".git/x.png", "notes.txt", "a.mask.png", "movie.mp4", "png"):
        write(tmp_path / name)
    assert names(folder(tmp_path)) == ["a.png", "b.JPG", "Ä.webp", "y/deep/1.jpeg", "z/10.jfif", "z/2.bmp"]


WRITTEN = {
    "run": ("runs/a/metrics.jsonl", "runs/a/samples/step_2/00_sampled.png", "runs/a/loss.png"),
    "generated": ("generated/00_00.png", "generated/grid.png"),
    "cache": ("cache/index.npz", "cache/manifest.json", "cache/a.png"),
    "export": ("lora/adapter_config.json", "lora/samples.png"),
    "model card": ("own/README.md", "own/samples.png"),
    "root is a run": (
        "metrics.jsonl",
        "loss.png",
        "loss_by_logsnr.png",
        "samples/step_2/01_x.png",
        "samples/step_2/grid.png",
    ),
    "thumbnails": ("@eaDir/a.png/SYNOPHOTO_THUMB_M.jpg", "__MACOSX/a.png", ".thumbnails/a.png", "._a.png"),
}


@pytest.mark.parametrize("files", WRITTEN.values(), ids=WRITTEN)
def test_what_runs_and_systems_write_below_the_folder_is_no_data(files: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("a.png", "sub/b.png", "own/c.png", *files):
        write(tmp_path / name)
    assert {picture.name for picture in find_pictures(tmp_path, [])} == {"a.png", "sub/b.png", "own/c.png"}


MASKED = ("a.mask.png", "a.MASK.PNG", "a-masklabel.png", "a-MaskLabel.PNG", "a_mask.png", "a-mask.webp", "a_mask.jpg")


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("picture", ["a.png", "sub/a.JPG"])
def test_a_mask_is_one_in_the_naming_of_other_trainers_too(name: str, picture: str, tmp_path: Path) -> None:
    write(tmp_path / picture, tars.picture(40, 40))
    mask = write((tmp_path / picture).with_name(name), tars.picture(40, 40, tint=9)).read_bytes()
    source = folder(tmp_path)
    assert names(source) == [picture]
    assert source.read(0).mask == mask


def test_our_own_naming_of_a_mask_wins_and_a_captioned_picture_is_one(tmp_path: Path) -> None:
    for name in ("a.png", "a.mask.png", "a_mask.png", "b.png", "b_mask.png", "lone_mask.png", "x_mask.png"):
        write(tmp_path / name)
    write(tmp_path / "b_mask.txt", "a carnival mask")
    source = folder(tmp_path)
    assert names(source) == ["a.png", "b.png", "b_mask.png", "lone_mask.png", "x_mask.png"]
    assert source.read(0).mask == (tmp_path / "a.mask.png").read_bytes()
    assert source.read(1).mask is None


@pytest.mark.parametrize("ending", ["-condlabel", "_depth", "-depth", ".canny"])
def test_a_control_map_is_no_picture_and_named(ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.png", f"a{ending}.png", "deep_depth.png"):
        write(tmp_path / name)
    assert names(folder(tmp_path)) == ["a.png", "deep_depth.png"]
    assert f"1 control maps beside pictures are not read, since task.filter makes them (a{ending}.png)" in caplog.text


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("ending", [".txt", ".TXT", ".caption", ".json", ".mask.png", "_mask.png"])
def test_a_file_beside_a_picture_is_found_in_either_form_of_accents(form: str, ending: str, tmp_path: Path) -> None:
    def spelt(text: str, form: str) -> str:
        return unicodedata.normalize(form, text)

    other = {"NFC": "NFD", "NFD": "NFC"}[form]
    content = {".json": '{"a": "of its json"}', ".png": tars.picture()}.get(Path(f"a{ending}").suffix, "its caption")
    write(tmp_path / spelt("été.png", form))
    write(tmp_path / spelt(f"été{ending}", other), content)
    source = folder(tmp_path, captions=Captions(template="{a}") if ending == ".json" else Captions())
    assert names(source) == [spelt("été.png", form)]
    raw = source.read(0)
    assert (raw.caption == "its caption", raw.values != {}, raw.mask is not None) == (
        ending.lower() in (".txt", ".caption"),
        ending == ".json",
        ending.endswith("png"),
    )


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("a photo of john riding a bicycle.webp", "a photo of john riding a bicycle"),
        ("sub_folder/a bench in a park_(1).png", "a bench in a park"),
        ("a bench_2_3.png", "a bench"),
        ("St. Mark's at 5.30 p.m..jpg", "St. Mark's at 5.30 p.m."),
        ("ein Mädchen, 犬.jpg", "ein Mädchen, 犬"),
        ("_1.jpg", ""),
    ],
)
def test_a_name_is_a_caption_up_to_its_first_underscore(name: str, caption: str) -> None:
    assert caption_of_name(name) == caption


def test_captions_come_from_files_or_names_as_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write(tmp_path / "one_(1).png")
    write(tmp_path / "two_(1).png")
    write(tmp_path / "two_(1).txt", "\ufeffa text \n")
    write(tmp_path / "three.png")
    write(tmp_path / "three.caption", "a caption")
    write(tmp_path / "_4.png")
    by_file = {"three.png": "a caption", "two_(1).png": "a text"}
    assert captions(folder(tmp_path)) == {"one_(1).png": "one", **by_file}
    assert "1 of 3 pictures have no caption file (.txt, .caption), so their names are" in caplog.text
    assert "left out 1 pictures without a caption: _4.png" in caplog.text
    caplog.clear()
    assert captions(folder(tmp_path, caption_from="file")) == by_file
    assert "left out 2 pictures without a caption: _4.png, one_(1).png" in caplog.text
    caplog.clear()
    assert captions(folder(tmp_path, caption_from="name")) == {
        "one_(1).png": "one",
        "three.png": "three",
        "two_(1).png": "two",
    }
    assert "have no caption file" not in caplog.text


def test_values_and_masks_come_with_the_picture(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        write(tmp_path / f"{name}.png")
    write(tmp_path / "a.json", json.dumps({"artist": "Ann", "score": 5}))
    write(tmp_path / "b.yaml", "artist: Bo\nscore: 3\n")
    write(tmp_path / "c.json", "[1]")
    mask = write(tmp_path / "a.mask.png")
    source = folder(tmp_path, captions=Captions(template="{caption} by {artist}"))
    source.open()
    assert [source.read(row).values["artist"] for row in (0, 1)] == ["Ann", "Bo"]
    assert [source.read(row).mask for row in (0, 1)] == [mask.read_bytes(), None]
    with pytest.raises(UnreadableSampleError, match="its json is damaged: no mapping that can be read"):
        source.read(2)
    assert source.read(3).values == {}
    plain = folder(tmp_path)
    plain.open()
    assert plain.read(2).values == {}


def test_row_filters_judge_values_beside_pictures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b", "c", "d"):
        write(tmp_path / f"{name}.png")
    write(tmp_path / "a.json", '{"score": 5}')
    write(tmp_path / "b.yml", "score: 3\n")
    write(tmp_path / "c.yml", "- [")
    with caplog.at_level(logging.INFO):
        assert names(folder(tmp_path, row_filters={"score": "> 2"})) == ["a.png", "b.yml".replace("yml", "png")]
        assert names(folder(tmp_path, row_filters={"score": "> 4"})) == ["a.png"]
    assert "keep 1 of 4 samples (25.0%); 2 have no readable json" in caplog.text
    write(tmp_path / "b.yml", "score: 4.5\n")
    assert names(folder(tmp_path, row_filters={"score": "> 4"})) == ["a.png", "b.png"]
    with pytest.raises(ConfigError, match="row_filters leave no sample, so nothing can train"):
        folder(tmp_path, row_filters={"score": "> 9"}).open()


def test_multiply_files_say_how_often_the_pictures_of_their_own_folder_come(tmp_path: Path) -> None:
    for number in range(10):
        for name in ("once", "often", "often/below", "rarely", "never"):
            write(tmp_path / name / f"{number}.png")
    write(tmp_path / "often/multiply.txt", " 2.3\n")
    write(tmp_path / "rarely/multiply.txt", "0.4")
    write(tmp_path / "never/multiply.txt", "0")
    found = Counter(names(folder(tmp_path)))
    per_folder = Counter(name.rpartition("/")[0] for name in found.elements())
    assert per_folder == {"once": 10, "often": 23, "often/below": 10, "rarely": 4}
    assert Counter(found[f"often/{number}.png"] for number in range(10)) == {2: 7, 3: 3}
    assert names(folder(tmp_path)) == list(names(folder(tmp_path)))
    assert names(folder(tmp_path))[:34] != names(folder(tmp_path))[-34:]


def test_only_changed_pictures_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    write(root / "a.png")
    write(root / "b.png", tars.picture(10, 20))
    first = folder(root).open()
    read = []
    size = picture_files.picture_facts

    def watched(path: Path) -> tuple[int, int]:
        read.append(path.name)
        return size(path)

    monkeypatch.setattr(picture_files, "picture_facts", watched)
    assert folder(root).open().digest == first.digest
    assert read == []
    write(root / "b.png", tars.picture(30, 20))
    write(root / "c.png")
    assert folder(root).open().table["width"].tolist() == [40, 30, 40]
    assert read == ["b.png", "c.png"]
    (root / "a.png").unlink()
    assert folder(root).open().table["width"].tolist() == [30, 40]
    assert read == ["b.png", "c.png"]
    (cached,) = (tmp_path / ".cascade_train_index").glob("root-*.npz")
    cached.write_bytes(b"damaged")
    assert folder(root).open().table["width"].tolist() == [30, 40]
    assert len(read) == 4


def rows(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in values)


def described_folder(path: Path) -> Path:
    """Write pictures, most of which rows of metadata files describe."""
    for name in ("a.png", "b.png", "sub/c_1.png", "d.png", "sub/e\u0301.png", "other_2.png"):
        write(path / name)
    write(path / "b.txt", "beside")
    told = ({"file_name": "a.png", "text": " of a ", "n": 3}, {"file_name": "b.png", "text": "of b"})
    more = (
        {"file_name": "./sub\\\\c_1.png", "caption": ["c", "C"]},
        {"file_name": "none.png", "text": "x"},
        {"text": "y"},
    )
    write(path / "metadata.jsonl", "\ufeff" + rows(*told, *more, {"file_name": "d.png", "text": ""}))
    write(path / "sub/metadata.csv", 'file_name,text,n\r\n\u00e9.png,"é, too",5\r\n')
    return path


def test_captions_come_from_metadata_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    root = described_folder(tmp_path / "root")
    found = captions(folder(root, metadata=True))
    assert found == {"a.png": "of a", "b.png": "beside", "sub/c_1.png": "c\nC", "sub/e\u0301.png": "é, too"}
    assert "captions of 3 of 6 pictures are those of metadata.jsonl, sub/metadata.csv" in caplog.text
    assert (
        "metadata.jsonl: 1 rows name no picture, or one that has a row already, and are not read: none.png"
        in caplog.text
    )
    assert "left out 2 pictures without a caption: d.png, other_2.png" in caplog.text
    assert "so their names are their captions" not in caplog.text
    before = captions(folder(root))
    assert before["a.png"] == "a"
    assert captions(folder(root, metadata=True, caption_from="name")) == before | {"b.png": "b"}
    values = folder(root, metadata=True, captions=Captions(key="n"), row_filters={"n": "> 2"})
    assert [values.open().keys.tolist(), values.read(0).values["n"], values.read(1).values["n"]] == [
        [b"a.png", b"sub/e\xcc\x81.png"], 3, "5",
    ]  # fmt: skip
    write(tmp_path / "plain/metadata.csv", "price\n3\n")
    write(tmp_path / "plain/a.png")
    assert captions(folder(tmp_path / "plain", metadata=True)) == {"a.png": "a"}
    write(tmp_path / "plain/metadata.jsonl", "{")
    with pytest.raises(ConfigError, match="metadata.jsonl, line 1 is no json mapping.*; data.metadata=false reads no"):
        folder(tmp_path / "plain", metadata=True).open()


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone.png")


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("loss", [Path.unlink, link_to_nothing, link_to_itself])
@pytest.mark.parametrize("suffix", [".png", ".txt", ".json", ".mask.png"])
def test_a_file_that_is_lost_during_a_run_is_one_unreadable_sample(loss, suffix: str, tmp_path: Path) -> None:
    for name in ("sub/a.png", "sub/a.txt", "sub/a.json", "sub/a.mask.png"):
        write(tmp_path / name, None if name.endswith("png") else "{}")
    source = folder(tmp_path, captions=Captions(template="{caption} {a}"))
    source.open()
    loss(tmp_path / f"sub/a{suffix}")
    with pytest.raises(UnreadableSampleError, match="is gone or may not be read|is damaged"):
        source.read(0)


@pytest.mark.parametrize(("number", "kind"), [(errno.EACCES, UnreadableSampleError), (errno.EIO, OSError)])
def test_a_lost_permission_is_the_samples_fault_and_a_failing_disk_is_not(number, kind, tmp_path, monkeypatch) -> None:
    write(tmp_path / "a.png")
    source = folder(tmp_path)
    source.open()
    monkeypatch.setattr("cascade_train.data.sample.open_regular", Mock(side_effect=OSError(number, "x")))
    with pytest.raises(kind) as raised:
        source.read(0)
    assert raised.type is kind
