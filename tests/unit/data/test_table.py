"""Tables that name pictures: csv, tsv and jsonl, their columns, and rows that cannot be used."""

from __future__ import annotations

import json
import logging
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from cascade_train.data.index import cache as picture_files
from cascade_train.data.table import Table
from cascade_train.errors import ConfigError
from tests.unit.data import tars
from tests.unit.data.dataset_contract import DatasetContract


def table(path: Any, **options: Any) -> Table:
    columns = {"image_column": "image", "caption_column": "caption", "mask_column": None, "root": None}
    return Table(path=path if isinstance(path, list) else str(path), **{**tars.SMALL, **columns, **options})


def pictures(folder: Path, *names: str) -> None:
    """Write pictures of these names."""
    for place, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(tars.picture(tint=place))


def text(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8", newline="")
    return path


def captions(source: Table) -> list[tuple[str, str]]:
    index = source.open()
    return [(index.keys[row].decode(), source.read(row).caption) for row in range(len(index))]


class TestTable(DatasetContract):
    order_digest = "b646e2e75ce09689"
    samples = 37

    @classmethod
    def make_source(cls, folder: Path, **options: Any) -> Table:
        if not (folder / "all.csv").exists():
            names = [f"pictures/{number}.png" for number in range(37)]
            pictures(folder, *names)
            text(folder / "all.csv", "image,caption\n" + "".join(f"{name},picture {name}\n" for name in names))
        return table(folder / "all.csv", **options)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(
    ("disk", "named"),
    [(("NFC", "NFC"), "NFD"), (("NFD", "NFD"), "NFC"), (("NFD", "NFC"), "NFC"), (("NFC", "NFD"), "NFD")],
)
def test_a_table_finds_its_files_in_either_form_of_accents_and_with_backslashes(
    disk: tuple[str, str], named: str, absolute: bool, tmp_path: Path
) -> None:
    place = "/".join(unicodedata.normalize(form, part) for form, part in zip(disk, ("né", "été.png"), strict=True))
    pictures(tmp_path, place, "sub/b.png")
    name = unicodedata.normalize(named, f"{tmp_path}/né/été.png" if absolute else "né/été.png")
    source = table(
        text(tmp_path / "t.csv", f"image,caption,m\n{name},a,{name}\nsub\\b.png,b,sub\\b.png\n"), mask_column="m"
    )
    index = source.open()
    assert [source.read(row).caption for row in range(len(index))] == ["a", "b"]
    assert source.read(0).mask == (tmp_path / place).read_bytes()


def test_cells_may_be_quoted_and_span_lines(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b, c.png", "ü.png")
    content = '\ufeffcaption,image\r\n"one, ""two""\r\nthree",a.png\r\n\r\nfour,"b, c.png",more\r\nfünf,ü.png'
    assert captions(table(text(tmp_path / "t.csv", content))) == [
        ("a.png", 'one, "two"\r\nthree'),
        ("b, c.png", "four"),
        ("ü.png", "fünf"),
    ]


def test_tabs_and_json_lines_are_tables_too(tmp_path: Path) -> None:
    pictures(tmp_path / "below", "a.png", "b.png")
    tab = text(tmp_path / "t.tsv", "file\ttext\na.png\tone, two\n")
    lines = [{"file": "b.png", "text": ["three", "four"], "score": 5}, {"file": "a.png", "text": "犬"}]
    jsonl = text(tmp_path / "t.jsonl", "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    options = {"image_column": "file", "caption_column": "text", "root": str(tmp_path / "below")}
    source = table([str(tab), str(jsonl)], **options)
    assert captions(source) == [("a.png", "one, two"), ("b.png", "three\nfour"), ("a.png", "犬")]
    assert source.read(1).values == lines[0]
    assert source.open().shards == ("t.tsv", "t.jsonl")


def test_a_picture_of_many_rows_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path, "a.png", "b.png")
    read = []
    size = picture_files.picture_facts
    monkeypatch.setattr(picture_files, "picture_facts", lambda path: read.append(path.name) or size(path))
    index = table(text(tmp_path / "t.csv", "image,caption\na.png,1\nb.png,2\na.png,3\n")).open()
    assert sorted(read) == ["a.png", "b.png"]
    assert index.keys.tolist() == [b"a.png", b"b.png", b"a.png"]
    assert index.table["width"].tolist() == [40] * 3


def test_rows_whose_masks_are_not_there_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pictures(tmp_path, "a.png", "b.png", "m.png")
    path = text(tmp_path / "t.csv", "image,mask,caption\na.png,m.png,1\nb.png,none.png,2\nb.png,,3\n")
    source = table(path, mask_column="mask")
    assert captions(source) == [("a.png", "1"), ("b.png", "3")]
    assert f"{path}: left out 1 rows whose masks are not there: none.png" in caplog.text
    (tmp_path / "m.png").unlink()
    alone = text(tmp_path / "alone.csv", "image,mask,caption\na.png,m.png,1\n")
    with pytest.raises(ConfigError, match=r"none of the masks in column mask is there: m.png; paths are relative"):
        table(alone, mask_column="mask").open()


def test_rows_without_pictures_or_captions_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pictures(tmp_path, "a.png")
    (tmp_path / "cut.png").touch()  # is there, and counts as unreadable
    rows = "a.png,one\n,two\na.png,\nabsent.png,three\n.,four\na.png\ncut.png,five\n"
    path = text(tmp_path / "t.csv", f"image,caption\n{rows}")
    assert captions(table(path)) == [("a.png", "one"), ("cut.png", "five")]
    assert "left out 3 rows without a picture or a caption" in caplog.text
    assert "left out 2 rows whose pictures are not there: absent.png, ." in caplog.text


def test_row_filters_compare_texts_that_are_numbers_as_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pictures(tmp_path, "a.png", "b.png", "c.png")
    path = text(tmp_path / "t.csv", "image,caption,score,lang\na.png,1984,5.5,en\nb.png,two,10,de\nc.png,three,,en\n")
    with caplog.at_level(logging.INFO):
        source = table(path, row_filters={"score": "> 5", "lang": "in ['en']"})
        assert captions(source) == [("a.png", "1984")]
    assert "data.row_filters score: > 5: 2 pass (66.7%)" in caplog.text
    assert source.read(0).values["score"] == "5.5"
    assert source.open().filters != ""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "file,caption\na.png,x\n", "data.image_column=image is no column of .*, which has file, caption"),
        ("t.csv", "image;caption\na.png;x\n", "which has image;caption; columns are separated by commas"),
        ("t.csv", "image,caption\nno.png,x\n", "none of 1 pictures is there: no.png; paths are relative to"),
        ("t.csv", 'image,caption\na.png,"x\n', "line 2: unexpected end of data; cells with quotes or line ends must"),
        ("t.jsonl", "\n[1]\n", "line 2 is no json mapping .it is a list"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    pictures(tmp_path, "a.png")
    with pytest.raises(ConfigError, match=message):
        table(text(tmp_path / name, content)).open()
