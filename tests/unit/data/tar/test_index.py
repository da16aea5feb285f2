from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from typing import Any

import pytest

from cascade_train.data.tar.index import load_shard, scan_shard
from cascade_train.errors import ConfigError
from tests.unit.data import tars


def test_places_of_every_part_are_found(tmp_path: Path) -> None:
    image = tars.picture(50, 20, kind="jpeg")
    files = [("set/0.jpg", image), ("set/0.json", b"{}"), ("set/0.txt", b"one"), ("set/1.png", tars.picture())]
    path = tars.write(tmp_path / "a.tar", [*files, ("set/1.txt", b"two")])
    shard = scan_shard(tars.found(path))
    content = path.read_bytes()

    def part(row: int, name: str) -> bytes:
        start, size = (int(shard.table[row][f"{name}_{what}"]) for what in ("start", "bytes"))
        return content[start : start + size]

    assert shard.keys.tolist() == [b"set/0", b"set/1"]
    assert [part(0, name) for name in ("image", "caption", "json")] == [image, b"one", b"{}"]
    assert [part(1, name) for name in ("caption", "json")] == [b"two", b""]
    assert shard.table[["width", "height"]].tolist() == [(50, 20), (40, 32)]


def test_a_damaged_cache_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(3)))
    load_shard(tars.found(path), tmp_path / "cache")
    (cached,) = (tmp_path / "cache").iterdir()
    cached.write_bytes(cached.read_bytes()[:100])
    assert len(load_shard(tars.found(path), tmp_path / "cache").table) == 3
    assert "is damaged" in caplog.text
    caplog.clear()
    assert len(load_shard(tars.found(path), tmp_path / "cache").table) == 3
    assert not caplog.text


PAIR = tars.samples(range(2))
APART = [PAIR[0], PAIR[2], PAIR[1], PAIR[3]]
UNUSABLE = "a.tar holds no usable sample: .*"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (APART, "the files of key 0000 are not next to each other"),
        ([], "a.tar is an empty tar, or holds no file with an extension"),
        (["a.png", "b.png"], UNUSABLE + r"2 keys with a picture but no caption .* found: a \(png\); b \(png\)"),
        (["a.v2.png", "a.v2.txt"], UNUSABLE + r".*a \(v2.png, v2.txt\)\. A sample is .* ends at the first dot"),
        (b"", "a.tar is not a readable tar file"),
        (gzip.compress(b"a tar"), r"is compressed \(gzip\)"),
    ],
    ids=itertools.count(),
)
def test_what_is_no_tar_of_samples_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "a.tar"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        tars.write(path, [(each, b"content") if isinstance(each, str) else each for each in content])
    with pytest.raises(ConfigError, match=message):
        scan_shard(tars.found(path))


def test_a_tar_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tars.write(tmp_path / "whole.tar", tars.samples(range(3))).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    cut = tmp_path / "cut.tar"
    lengths = [*range(512, end + 1, 512), end - 100, end + 300]
    assert len(lengths) > 12
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"is cut short: it has no end mark|unexpected end of data"):
            scan_shard(tars.found(cut))
    cut.write_bytes(whole[: end + 512])  # the first of the two blocks of the mark is enough
    assert len(scan_shard(tars.found(cut)).table) == 3


@pytest.mark.parametrize("fault", ["joined", "damaged"])
def test_a_tar_that_goes_on_where_it_seems_to_end_is_refused(tmp_path: Path, fault: str) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(3)))
    content = bytearray(path.read_bytes())
    if fault == "joined":
        content *= 2
    else:
        second = content.index(b"0001.png")
        content[second + 148 : second + 156] = b"notanumb"  # the checksum of its header
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"goes on after its end mark at byte \d+, as when tars are joined"):
        scan_shard(tars.found(path))
