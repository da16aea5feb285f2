from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cascade_train.data.urls import expand_urls
from cascade_train.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("000.tar", "001.tar", "a.tar", "b.tar"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("urls", "names"),
    [
        ("a.tar", ["a.tar"]),
        (["b.tar", "a.tar"], ["b.tar", "a.tar"]),
        ("{000..001}.tar", ["000.tar", "001.tar"]),
        (["{b,a}.tar", "file:000.tar"], ["b.tar", "a.tar", "000.tar"]),
    ],
)
def test_every_form_keeps_its_order(folder: Path, urls: Any, names: list[str]) -> None:
    assert expand_urls(urls) == [Path(name) for name in names]


@pytest.mark.parametrize("prefix", ["file:", "file://"])
def test_file_urls_may_be_absolute(folder: Path, prefix: str) -> None:
    assert expand_urls(f"{prefix}{folder}/a.tar") == [folder / "a.tar"]


def test_the_home_folder_has_its_short_form(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert expand_urls(["~/a.tar"]) == [folder / "a.tar"]


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ("{000..003}.tar", r"2 of 4 tar files not found: 002.tar, 003.tar\. Paths are relative to the current folder"),
        ("{0..9}.tar", r"10 of 10 tar files not found: 0.tar, 1.tar, 2.tar, \.\.\."),
        ("{000..003.tar", "has unbalanced braces: write {000..005}"),
        ("s3://bucket/a.tar", "is not a local file: s3: is not supported"),
        ("pipe:cat a.tar", "is not a local file: pipe: is not supported"),
        (".", "is a folder: name the tar files in it"),
        ("*.tar", "Name them by braces"),
    ],
)
def test_what_cannot_be_read_is_explained(folder: Path, urls: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand_urls(urls)
