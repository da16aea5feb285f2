"""The emoji of docs/tutorial.md: what is left out, what is held out, and what a machine lacks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.emoji_pictures import COMBINATIONS, captions, main, missing, part_of

LACKING = missing() or ""
needs_names = pytest.mark.skipif("pip install emoji" in LACKING, reason=f"needs {LACKING}")


def words(caption: str) -> list[str]:
    return caption.lower().replace("-", " ").split()


def test_what_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "emoji", None)
    out = tmp_path / "emoji"
    assert main(["--font", str(tmp_path / "none.ttf"), "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert "apt-get install fonts-noto-color-emoji" in told
    assert "pip install emoji" in told
    assert not out.exists()


@needs_names
def test_every_word_of_a_combination_is_in_a_training_caption() -> None:
    found = captions()
    parts: dict[str, list[str]] = {"train": [], "held_out": [], "combinations": []}
    for emoji, caption in found.items():
        parts[part_of(emoji, caption)].append(caption)
    assert len(set(found.values())) == len(found) > 1800
    assert sorted(parts["combinations"]) == sorted(COMBINATIONS)
    seen = {word for caption in parts["train"] for word in words(caption)}
    assert {word for caption in COMBINATIONS for word in words(caption)} <= seen
