"""The doctor: what it finds in a folder that is not well, on a page and in text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from cascade_train.__main__ import launch
from cascade_train.data.data_set import open_data_set
from cascade_train.data.survey import survey
from cascade_train.models.text_encoder import token_counter
from tests.unit.data import tars
from tests.unit.data.decoding.test_decode import ADOBE_RGB
from tests.unit.data.test_folder import folder, write
from tests.unit.data.test_mixture import mixture_of

SMALL = ("model=c_tiny", "data.num_workers=0")


def inspected(out: Path, *arguments: str) -> None:
    assert launch(["inspect", *SMALL, *arguments, f"out={out}"]) == 0


def of(root: Path, *more: str) -> tuple[str, ...]:
    return ("data=folder", f"data.path={root}", *more)


def sick_folder(root: Path) -> Path:
    """Write a folder with one of each fault among pictures that are well."""
    good = {f"good_{number}": (tars.picture(64, 48, tint=40 * number), f"picture {number}") for number in range(6)}
    faulty = {
        "sub/copy": (good["good_3"][0], "<b>a copy</b> & more"),
        "cut": (tars.picture(tint=7)[:90], "a picture that ends early"),
        "header": (b"no picture at all", "no header"),
        "long": (tars.picture(tint=99), "star " * 90),
        "empty": (tars.picture(tint=120), " \n"),
    }
    for name, (picture, caption) in (good | faulty).items():
        write(root / f"{name}.png", picture)
        write(root / f"{name}.txt", caption)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (60, 20)).save(root / "turned.jpg", exif=exif, icc_profile=ADOBE_RGB)
    write(root / "turned.txt", "a picture that is turned")
    write(root / "lonely.png", tars.picture(tint=130))
    return root


class Page(HTMLParser):
    """The text, the sources of pictures, and the tags left open of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.sources, self.open = "", [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, Path]:
    base = tmp_path_factory.mktemp("inspect")
    root, out = sick_folder(base / "sick"), base / "new/page.html"
    inspected(out, *of(root, "data.caption_from=file", "data.aspect_ratios=[1/1,1/2]"), "pictures=4")
    return Page(out.read_text()), root


def test_every_fault_is_found(seen: tuple[Page, Path]) -> None:
    text = seen[0].text
    for finding in (
        "2 cannot be read",
        "1 have no readable header",
        "1 pictures have the content of another one",
        "1 captions are empty",
        "1 captions have more than 24 tokens, by the packaged tokenizer",
        "1 pictures are turned by their orientation tag",
        "1 pictures have another colour profile",
        "left out 1 pictures without a caption: lonely.png",
        "12 samples in an epoch, 12 different pictures",
    ):
        assert finding in text, finding
    assert "sick:sub/copy.png (the same as sick:good_3.png)" in text
    assert re.search(r"sick:long.png \(its caption has 9\d tokens\)", text)
    assert "sick:turned.jpg" in text


def test_the_page_stands_alone_and_shows_a_batch(seen: tuple[Page, Path]) -> None:
    page, _ = seen
    assert page.open == []
    assert len(page.sources) == 4
    assert all(source.startswith("data:image/jpeg;base64,") for source in page.sources)
    assert "<b>a copy</b> & more" in page.text


def test_findings_are_told_as_text_and_nothing_else_is_where_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(5)))
    page, fitting = tmp_path / "page.html", ["data.aspect_ratios=[3/4]", "data.buckets.multiple_px=8"]
    inspected(page, f"data.urls={path}", "read=3", *fitting)
    text = capsys.readouterr().out
    assert "Data of WebDataset, for pictures of" in text
    assert "5 samples in an epoch, 5 different pictures\n3 of them read and decoded\n1 training sizes;" in text
    assert "nothing found that is worth a look" in text
    bad = tars.write(tmp_path / "b.tar", tars.samples(range(40, 60), damaged=range(45, 60)))
    inspected(page, f"data.urls={bad}")
    stops = "a run stops, since data.max_unreadable_share=0.01 allows fewer: leave them out by data.quarantine=<list>"
    text = capsys.readouterr().out
    assert f"! [75 % of an epoch] 15 cannot be read; {stops}, or allow data.max_unreadable_share=0.75: b.tar:" in text
    inspected(page, f"data.urls={bad}", "data.max_unreadable_share=0.75")
    assert "! [75 % of an epoch] 15 cannot be read: b.tar:0045 (" in capsys.readouterr().out


def test_data_too_damaged_for_a_batch_still_has_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "root/a red thing.png", b"no picture")
    inspected(tmp_path / "page.html", *of(tmp_path / "root"))
    text = capsys.readouterr().out
    assert "No batch could be made: " in caplog.text
    assert not [each for each in caplog.messages if each in text], "what is logged is not printed too"
    assert "! [100 % of an epoch] 1 cannot be read; a run stops, since" in text
    assert "root:a red thing.png (not a picture" in text
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_masks_that_do_not_fit_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, size, mask in (("a", 64, 64), ("b", 65, 64), ("c", 66, None)):
        write(tmp_path / f"root/{name}.png", tars.picture(size, 48, tint=size))
        write(tmp_path / f"root/{name}.mask.png", b"no picture" if mask is None else tars.picture(mask, 48))
    inspected(tmp_path / "page.html", *of(tmp_path / "root"))
    text = capsys.readouterr().out
    assert "2 cannot be read" in text
    assert "root:b.png (the mask is 64 x 48 px, the picture 65 x 48: they must be equal)" in text


def test_a_survey_says_how_pictures_fit_their_sizes(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"root/wide {number}.png", tars.picture(64, 32, tint=number))
    write(tmp_path / "root/small.png", tars.picture(8, 8))
    write(tmp_path / "root/multiply.txt", "2")
    found = survey(open_data_set(folder(tmp_path / "root"), share=None, held_out=None).training, read=None, seed=0)
    (bucket,) = found.buckets
    assert (bucket.height, bucket.width, bucket.samples, bucket.enlarged) == (16, 16, 8, 2)
    assert (found.samples, found.pictures, len(found.names)) == (8, 4, 4)
    assert found.shapes[0].cropped == pytest.approx(0.5 * 3 / 4)
    assert "small" in found.captions


def test_a_picture_of_two_rows_or_sizes_is_not_its_own_duplicate(tmp_path: Path) -> None:
    tars.write(tmp_path / "a.tar", tars.samples(range(4)))
    tars.write(tmp_path / "b.tar", tars.samples([3]))
    sizes = mixture_of({f"s{size}": tars.webdataset(tmp_path / "a.tar", image_size=size) for size in (16, 32)})
    both = tars.webdataset(tmp_path / "{a,b}.tar")
    for source, twice in ((sizes, []), (both, [[3, 4]])):
        found = survey(open_data_set(source, share=None, held_out=None).training, read=None, seed=0)
        assert found.twice == twice


def test_samples_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, listed = tmp_path / "page.html", tmp_path / "list.jsonl"
    for folder_name in "cd":
        (tmp_path / folder_name).mkdir()
    tars.write(tmp_path / "c/train.tar", tars.samples(range(2)))
    tars.write(tmp_path / "d/train.tar", tars.samples([2, 1, 0], damaged=[1]))
    inspected(page, f"data.urls=[{tmp_path}/c/train.tar,{tmp_path}/d/train.tar]", f"quarantine={listed}")
    text = capsys.readouterr().out
    assert "5 samples in an epoch, 5 different pictures" in text
    assert "1 pictures have the content of another one: train.tar:0000 (the same as train.tar:0000)" in text
    assert "! [20 % of an epoch] 1 cannot be read" in text
    assert "2 more are not listed: a list has names, and samples that are well have theirs" in text
    assert listed.read_text() == ""

    write(tmp_path / "a.png", tars.picture())
    write(tmp_path / "b.png", b"no picture")
    write(tmp_path / "t.csv", b'image,text\na.png,first\na.png," "\nb.png,one\nb.png,two\n')
    columns = ("data=csv", f"data.path={tmp_path / 't.csv'}", "data.caption_column=text")
    inspected(page, *columns, f"quarantine={listed}", "faults=[unreadable,duplicates,empty]", "overwrite=true")
    text = capsys.readouterr().out
    assert "1 captions are empty: t.csv:a.png (its" in text
    assert "the content of another" not in text
    assert "1 more are not listed" in text
    assert [json.loads(line)["sample"] for line in listed.read_text().splitlines()] == ["t.csv:b.png"]


def test_repeated_samples_count_once_and_keys_may_come_in_several_tars(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tars.write(tmp_path / f"{name}.tar", tars.samples(range(600 if name == "b" else 5)))
    parts = {name: tars.webdataset(tmp_path / f"{name}.tar") for name in ("a", "b")}
    source = mixture_of({**parts, "both": tars.webdataset(tmp_path / "{a,b}.tar")}, repeats={"a": 200.0})
    found = survey(open_data_set(source, share=None, held_out=None).training, read=10, seed=0)
    assert len(source.open().shards) == 2
    assert (found.samples, found.pictures) == (5 * 200 + 600 + 605, 5 + 600 + 605)


def test_tokens_are_counted_by_the_model_where_it_is_here(tmp_path: Path) -> None:
    packaged = token_counter(None, None)
    assert packaged.name == "the packaged tokenizer"
    assert packaged(["a red star", ""]) == [5, 2]
    assert packaged([]) == []
    packaged.tokenizer.save_pretrained(tmp_path / "model/tokenizer")
    here = token_counter(str(tmp_path / "model"), "tokenizer")
    assert here.name == f"the tokenizer of {tmp_path / 'model'}"
    assert here(["a red star"]) == [5]
    for absent in ("nobody/nothing-of-this-name", str(tmp_path)):
        counter = token_counter(absent, "tokenizer")
        assert f"the packaged tokenizer, since that of {absent} is not on this machine" in counter.name
        assert counter(["a red star"]) == [5]


def test_what_costs_most_comes_first_and_what_helps_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    for number in range(8):
        write(root / f"{number}.png", tars.picture(96, 48, tint=30 * number))
        write(root / f"{number}.txt", f"a picture, {number}, red" if number else "star " * 90)
    write(root / "copy.png", (root / "1.png").read_bytes())
    write(root / "copy.caption", "a copy, of one")
    lists = {"quarantine": tmp_path / "list.jsonl", "captions": tmp_path / "lists/captions.jsonl"}
    arguments = of(root, "train.global_batch_size=4", "data.captions.tags.separator=','")
    captions = ["data.captions.tags.shuffle=true", "data.captions.template='x {caption}'"]
    files = [*(f"{key}={path}" for key, path in lists.items()), "faults=[duplicates,long]"]
    inspected(tmp_path / "page.html", *arguments, *captions, *files)
    text = capsys.readouterr().out
    findings = [line for line in text.splitlines() if line.startswith("! ")]
    costs = [float(re.match(r"! \[(\S+) % of an epoch\]", line)[1]) for line in findings]
    assert costs == sorted(costs, reverse=True)
    assert findings[0].startswith("! [50 % of an epoch] 9 samples lose more than 10% to cropping")
    assert "data.aspect_ratios=original leaves 0 of them" in findings[0]
    assert "captions come from .txt beside the picture, tags shuffled or dropped, template 1 of 1 (8); .caption" in text
    rows = [json.loads(line) for line in lists["captions"].read_text().splitlines()]
    origin = ".caption beside the picture, tags shuffled or dropped, template 1 of 1"
    assert (len(rows), rows[-1]["sample"], rows[-1]["from"]) == (9, "root:copy.png", origin)
    listed = {row["sample"]: row["reason"] for row in map(json.loads, lists["quarantine"].read_text().splitlines())}
    assert listed == {"root:copy.png": "the same as root:1.png", "root:0.png": "its caption has 93 tokens"}
    inspected(tmp_path / "again.html", *arguments, f"data.quarantine={lists['quarantine']}")
    text = capsys.readouterr().out
    assert "7 samples in an epoch" in text
    assert "the content of another" not in text
    assert "<th>data.aspect_ratios</th>" in (tmp_path / "again.html").read_text()


def test_its_own_lists_are_written_again_but_none_that_was_edited_or_is_read_or_named_twice(tmp_path: Path, capfd):
    root, page = sick_folder(tmp_path / "root"), tmp_path / "page.html"
    captions, listed = tmp_path / "captions.jsonl", tmp_path / "list.jsonl"
    lists = (f"captions={captions}", f"quarantine={listed}")
    for _ in range(2):
        inspected(page, *of(root), *lists)
    for path in (captions, listed):
        with path.open("a") as file:
            file.write('{"sample": "root:mine.png"}\n')
        assert launch(["inspect", *SMALL, *of(root), *lists, f"out={page}"]) == 2
        assert f"={path} exists" in capfd.readouterr().err
        inspected(page, *of(root), *lists, "overwrite=true")
    for more in (f"data.quarantine={listed}", f"captions={listed}"):
        assert launch(["inspect", *SMALL, *of(root), f"quarantine={listed}", more, f"out={page}"]) == 2
    assert "mine" not in listed.read_text()


@pytest.mark.parametrize("key", ["out", "captions", "quarantine"])
def test_a_picture_or_caption_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd, key: str):
    monkeypatch.chdir(tmp_path)
    Path("dog.txt").write_text("a dog")
    assert launch(["inspect", *SMALL, "data=shapes", f"{key}=dog.txt"]) == 2
    assert f"{key}=dog.txt exists" in capfd.readouterr().err
    assert Path("dog.txt").read_text() == "a dog"
