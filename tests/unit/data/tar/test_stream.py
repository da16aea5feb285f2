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

from cascade_train.data.stream import read_tar
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
    return list(read_tar(found(url), **{"max_file_bytes": 2**20, "dropped": Dropped(), **options}))


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
        ("head -c 4000 {0}; echo no such bucket >&2; exit 3", "ended with code 3: no such bucket"),
        ("cat {0}.missing | cat", "ended with code 1: .*a.tar.missing: No such file"),
        ("cat {0} {0}", "goes on after its end mark"),
        ("cat {0} && head -c 3000000 /dev/zero", "goes on after the end of its tar; give one tar for each"),
        ("true", "is not a readable tar file"),
    ],
)
def test_a_command_that_fails_is_named(tmp_path: Path, command: str, message: str) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(3)))
    with pytest.raises((ConfigError, RunError), match=message):
        read(f"pipe:{command.format(path)}")


def test_a_reader_that_stops_early_ends_its_command(tmp_path: Path) -> None:
    path = tars.write(tmp_path / "a.tar", tars.samples(range(3)))
    mark = tmp_path / "pid"
    url = f"pipe:echo $$ > {mark}; cat {path}; sleep 60"
    samples = read_tar(found(url), max_file_bytes=2**20, dropped=Dropped())
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
    with pytest.raises((ConfigError, RunError), match="a.tar.gz (cannot be read to its end|is not a readable tar)"):
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


def test_names_are_parted_as_webdataset_parts_them():
    rule = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
    names = ["".join(name) for length in range(7) for name in itertools.product("a./", repeat=length)]
    expected = [None if (match := rule.match(name)) is None else match.groups() for name in names]
    assert len([each for each in expected if each]) > 100
    assert [key_and_extension(name) for name in names] == expected
    assert_linear(key_and_extension, lambda length: "a/" * length)
