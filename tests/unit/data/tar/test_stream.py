"""Tars that are read forward: pipes, compressed and damaged ones, and what a hostile one may try."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import lzma
import random
import re
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cascade_train.data.index.row_filter import parse_row_filters
from cascade_train.data.stream import Cursor, Stream, StreamSpec, stream_samples
from cascade_train.data.tar.files import Listings, Tar, find_tars
from cascade_train.data.tar.index import scan_shard
from cascade_train.data.tar.members import Dropped, key_and_extension
from cascade_train.errors import ConfigError, RunError
from tests.growth import assert_linear
from tests.unit.data import tars


def found(url: Path | str) -> Tar:
    (tar,) = find_tars([str(url)], Listings(None))
    return tar


def read(url: Path | str, **options: Any) -> list[tuple[str, dict[str, bytes]]]:
    limits = {"max_file_bytes": 2**20, "timeout_seconds": 5.0, "dropped": Dropped(), **options}
    return list(stream_samples(found(url), **limits))


@pytest.mark.parametrize(("end", "squeeze"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_every_way_of_reading_gives_the_same_samples(
    tmp_path: Path, end: str, squeeze: Callable[[bytes], bytes]
) -> None:
    files = [
        *tars.samples(range(3)),
        ("0002.json", b"{}"),
        ("0002.mask.png", tars.picture()),
        ("a.bin", bytes(3 * 2**20)),
    ]
    path = tars.write(tmp_path / "a.tar", files)
    squeezed = tmp_path / f"a.tar{end}"
    squeezed.write_bytes(squeeze(path.read_bytes()))
    expected = read(path)
    assert [key for key, _ in expected] == ["0000", "0001", "0002"]
    assert {name: len(parts) for name, parts in expected} == {"0000": 2, "0001": 2, "0002": 4}
    assert read(squeezed) == expected
    assert read(f"pipe:cat {path}") == expected
    if end == ".gz":  # the others' programs are not everywhere
        assert read(f"pipe:cat {squeezed} | gzip -d") == expected


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("head -c 4000 {0}", r"pipe:head <redacted> .*a.tar (ends within|is cut short|is not a readable tar)"),
        ("head -c 4000 {0}; echo no such bucket >&2; exit 3", "ended with code 3: no such bucket"),
        ("cat {0}; exit 4", "ended with code 4: no error message"),
        ("cat {0}.missing | cat", "ended with code 1: .*a.tar.missing: No such file"),
        ("cat {0} {0}", "goes on after its end mark"),
        ("cat {0} && head -c 3000000 /dev/zero", "goes on after the end of its tar; give one tar for each"),
        ("echo hello", "is not a readable tar file"),
        ("true", "is not a readable tar file"),
    ],
)
def test_a_command_that_fails_is_named(tmp_path: Path, command: str, message: str) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(3)))
    with pytest.raises((ConfigError, RunError), match=message):
        read(f"pipe:{command.format(path)}")


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(3)))
    mark = tmp_path / "pid"
    with pytest.raises(RunError, match="gave no output for 0.3 s; see why, or raise data.stream.timeout_seconds"):
        read(f"pipe:echo $$ > {mark}; head -c 4000 {path}; sleep 900", timeout_seconds=0.3)
    assert not Path(f"/proc/{int(mark.read_text())}").exists()


def test_a_reader_that_stops_early_ends_its_command(tmp_path: Path) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(3)))
    mark = tmp_path / "pid"
    url = f"pipe:echo $$ > {mark}; cat {path}; sleep 60"
    samples = stream_samples(found(url), max_file_bytes=2**20, timeout_seconds=None, dropped=Dropped())
    next(samples)
    samples.close()
    assert not Path(f"/proc/{int(mark.read_text())}").exists()


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-40], lambda content: content[:200] + b"xx" + content[202:]]
)
def test_a_damaged_compressed_tar_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "a.tar.gz"
    whole = tars.write(
        tmp_path / "a.tar", [("a.bin", random.Random(0).randbytes(3000)), *tars.samples(range(30))]
    ).read_bytes()
    path.write_bytes(damage(gzip.compress(whole)))
    with pytest.raises(RunError, match=f"{path} cannot be read to its end: .*; copy it again"):
        read(path)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_claims_gigabytes_takes_no_memory(tmp_path: Path, kind: bytes) -> None:
    header = tarfile.TarInfo("a.png")
    header.type, header.size = kind, 8 * 2**30
    content = io.BytesIO(header.tobuf(tarfile.GNU_FORMAT) + bytes(4 * 2**20))
    path, squeezed = tmp_path / "a.tar", tmp_path / "a.tar.gz"
    path.write_bytes(content.getvalue())
    squeezed.write_bytes(gzip.compress(content.getvalue()))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="a.tar.gz is not a readable tar file .a header at byte 512 claims 85899"):
            read(squeezed)
        with pytest.raises(ConfigError, match="a.tar is not a readable tar file .a header at byte 512 claims 85899"):
            scan_shard(found(path))
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()


def test_a_file_that_unpacks_to_too_much_is_refused_before_it_is_read(tmp_path: Path) -> None:
    header = tarfile.TarInfo("a.png")
    header.size = 40 * 2**20
    path = tmp_path / "a.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header.tobuf())
        for _ in range(40):
            file.write(bytes(2**20))
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    try:
        with pytest.raises(
            RunError, match=r"a.png has 41943040 bytes, more than data.stream.max_file_mib=1: remove it"
        ):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_a_member_of_two_gigabytes_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    size = 2**31 + 1000
    with path.open("wb") as file:
        big = tarfile.TarInfo("0000.bin")
        big.size = size
        file.write(big.tobuf())
        file.seek(512 + (size + 511) // 512 * 512)  # a hole: no disk is used
        file.write(tars.write(tmp_path / "rest.tar", tars.samples([0])).read_bytes())
    shard = scan_shard(tars.found(path))
    assert shard.keys.tolist() == [b"0000"]
    assert int(shard.table["image_start"][0]) > 2**31
    source = tars.webdataset(path)
    source.open()
    assert source.read(0).caption == "picture 0"


def test_a_block_is_cut_by_its_bytes(tmp_path: Path) -> None:
    files = [(f"{key}.{end}", content) for key in range(8) for end, content in (("png", bytes(400_000)), ("txt", b"x"))]
    path = tars.write(tmp_path / "a.tar", files)
    spec = StreamSpec(buffer_samples=100, buffer_mib=1)
    options = {"number": 0, "streams": 1, "seed": 0, "spec": spec, "filters": parse_row_filters(None)}
    takes = Stream([found(f"pipe:cat {path}")], [0], keeps_json=False, **options).takes(Cursor(), 1)
    assert [len(next(takes).blocks) for _ in range(9)] == [3, 3, 3, 3, 3, 3, 2, 2, 3]


@pytest.mark.parametrize("name", ["buffer_samples", "buffer_mib", "max_file_mib", "timeout_seconds"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"data.stream.{name}=0 must be greater than 0"):
        StreamSpec(**{name: 0})
    with pytest.raises(ValueError, match="data.streams=0 must be greater than 0; give a larger data.streams, or null"):
        tars.webdataset(["pipe:true"], streams=0)


def test_names_are_parted_as_webdataset_parts_them_and_in_time_in_proportion_to_them():
    rule = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
    names = ["".join(name) for length in range(7) for name in itertools.product("a./", repeat=length)]
    expected = [None if (match := rule.match(name)) is None else match.groups() for name in names]
    assert len([each for each in expected if each]) > 100
    assert [key_and_extension(name) for name in names] == expected
    assert_linear(key_and_extension, lambda length: "a/" * length)


def test_what_macos_writes_beside_files_is_passed_over(tmp_path: Path) -> None:
    files = [(f"set/{prefix}a.{end}", content) for end, content in (("png", tars.picture()), ("txt", b"a cat"))
             for prefix in ("._", "")]  # fmt: skip
    source = tars.webdataset(tars.write(tmp_path / "a.tar", files))
    assert source.open().keys.tolist() == [b"set/a"]
    assert source.read(0).caption == "a cat"
