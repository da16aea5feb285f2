"""Data from elsewhere that means harm: files of any size, names that are paths or commands of a terminal, devices."""

from __future__ import annotations

import io
import logging
import tarfile
from pathlib import Path

import pytest

from cascade_train.data.captions import Captions
from cascade_train.data.folder import read_values
from cascade_train.data.sample import FileLimits, UnreadableSampleError
from tests.unit.data import tars
from tests.unit.data.test_folder import folder

SMALL = {"max_file_mib": 1, "max_text_kib": 1}
LARGE_JSON = b'{"score": 9}' + b" " * 2048


def sample(key: str, *, caption: bytes = b"a", json: bytes = b'{"score": 9}', image: bytes = b"") -> list:
    return [(f"{key}.png", image or tars.picture()), (f"{key}.txt", caption), (f"{key}.json", json)]


def test_a_member_larger_than_allowed_is_not_read(tmp_path: Path) -> None:
    bulky = tars.picture() + b"\0" * 1024**2
    files = [*sample("a"), *sample("b", image=bulky), *sample("c", caption=b"x" * 2048), *sample("d", json=LARGE_JSON)]
    source = tars.webdataset(tars.write(tmp_path / "a.tar", files), captions=Captions(template="{score}"), **SMALL)
    assert len(source.open()) == 4
    assert source.read(0).values == {"score": 9}
    for row, reason in (
        (1, r"image has \d+ bytes, more than data.max_file_mib=1"),
        (2, "caption has 2048 bytes, more"),
        (3, "its json has 2060 bytes, more than data.max_text_kib=1 allows"),
    ):
        with pytest.raises(UnreadableSampleError, match=reason):
            source.read(row)


def test_files_of_a_folder_have_limits_and_devices_are_not_opened(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.png").write_bytes(tars.picture())
        (tmp_path / f"{name}.txt").write_text("a caption")
        (tmp_path / f"{name}.json").write_bytes(LARGE_JSON if name == "b" else b'{"score": 9}')
    source = folder(tmp_path, captions=Captions(template="{score} {caption}"), **SMALL)
    source.open()
    (tmp_path / "a.txt").write_text("x" * 2048)
    (tmp_path / "c.png").unlink()
    (tmp_path / "c.png").symlink_to("/dev/zero")
    reasons = ("its caption has 2048 bytes", "its json is damaged: .* or too large", "its image is no plain file")
    for row, reason in enumerate(reasons):
        with pytest.raises(UnreadableSampleError, match=reason):
            source.read(row)
    assert source.read(3).caption == "a caption"
    for limit, left in ((1, 3), (None, 4), (1, 3)):
        assert len(folder(tmp_path, row_filters={"score": "> 4"}, max_text_kib=limit).open()) == left


def test_names_in_a_tar_are_keys_and_never_paths(tmp_path: Path) -> None:
    place = tmp_path / "in" / "a.tar"
    place.parent.mkdir()
    odd = {tarfile.SYMTYPE: "l.png", tarfile.LNKTYPE: "h.png", tarfile.CHRTYPE: "c.png", tarfile.FIFOTYPE: "f.png"}
    with tarfile.open(place, "w") as tar:
        for kind, name in odd.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.devmajor, entry.devminor = kind, "/etc/passwd", 1, 5
            tar.addfile(entry)
        for name, content in [*sample("../../escaped"), *sample("/absolute")]:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    source = tars.webdataset(place, index_dir=str(tmp_path / "index"))
    index = source.open()
    assert [index.name(row) for row in range(len(index))] == ["a.tar:../../escaped", "a.tar:/absolute"]
    assert source.read(0).caption == "a"
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".png", ".txt", ".json")]


def test_names_that_command_a_terminal_or_forge_a_line_are_shown_escaped(tmp_path: Path, caplog) -> None:
    evil = "a\x1b[2J\nINFO all is well"
    files = [*sample(evil), (f"b{evil}.txt", b"no picture")]
    with caplog.at_level(logging.WARNING):
        index = tars.webdataset(tars.write(tmp_path / "a.tar", files)).open()
    assert index.name(0) == r"a.tar:a\x1b[2J\nINFO all is well"
    assert r"ba\x1b[2J\nINFO all is well (txt)" in caplog.text
    assert "\x1b" not in caplog.text


BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))
YAMLS = [BOMB, "day: 2001-99-99", "a: " + "9" * 10_000, "[" * 5000, "!!python/name:os.system x", "a: 'b"]


@pytest.mark.parametrize("content", [*YAMLS, "a: !!timestamp x"])
def test_a_yaml_that_would_break_the_reader_or_run_code_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.yaml").write_text(content)
    assert read_values(tmp_path / "a.yaml", FileLimits(max_file_mib=None, max_text_kib=None)) is None
