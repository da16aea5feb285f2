from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cascade_train.data.tar.files import Listings, expand_urls, find_tars
from cascade_train.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("000.tar", "001.tar", "a.tar", "b.tar", "a.tar.zst"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("urls", "names"),
    [
        ("a.tar", ["a.tar"]),
        (["b.tar", "a.tar"], ["b.tar", "a.tar"]),
        ("{000..001}.tar", ["000.tar", "001.tar"]),
        ("{000..000}.tar", ["000.tar"]),
        (["{b,a}.tar", "file:000.tar"], ["b.tar", "a.tar", "000.tar"]),
        ("s3://bucket/{0..1}/a.tar", ["s3://bucket/0/a.tar", "s3://bucket/1/a.tar"]),
        (["a.tar", "s3://bucket/set/"], ["a.tar", "s3://bucket/set/"]),
        ("pipe:cat {a,b}.tar", ["pipe:cat a.tar", "pipe:cat b.tar"]),
        (r"pipe:awk '{print \$1}' a", [r"pipe:awk '{print \$1}' a"]),
    ],
)
def test_every_form_keeps_its_order(urls: Any, names: list[str]) -> None:
    assert expand_urls(urls) == names


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ("{000..003}.tar", r"2 of 4 tar files not found: 002.tar, 003.tar\. Paths are relative to the current folder"),
        ("{0..9}.tar", r"10 of 10 tar files not found: 0.tar, 1.tar, 2.tar and 7 more\."),
        ("{1000000..1000003}.tar", r"4 of 4 tar files not found: 1000000.tar"),
        ("{000..003.tar", "has unbalanced braces: write {000..005}"),
        (
            "https://a.b/c.tar",
            "has a scheme that is not read, https: .* stream it by 'pipe:curl --fail .* https://a.b/c",
        ),
        ("ftp://bucket/a.tar", "has a scheme that is not read, ftp: .* copy the tars to a disk or to S3"),
        ("pipe: ", "pipe: has no command: write pipe:cat train.tar"),
        ("a.tar.zst", r"a.tar.zst is compressed in a way that is not read here; stream it, as in 'pipe:zstd -dc a.tar"),
        ("*.tar", "Name them by braces"),
    ],
)
def test_what_cannot_be_read_is_explained(folder: Path, urls: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_tars(urls, Listings(None))
