"""The emoji of docs/tutorial.md: what is left out, what is held out, and what a machine lacks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import ImageFont

from scripts import emoji_pictures
from scripts.emoji_pictures import COMBINATIONS, FONT, SIDE_PX, captions, draw, main, missing, part_of

LACKING = missing() or ""
needs_names = pytest.mark.skipif("pip install emoji" in LACKING, reason=f"needs {LACKING}")
needs_font = pytest.mark.skipif("apt-get" in LACKING or "raqm" in LACKING, reason=f"needs {LACKING}")


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


def test_flags_and_keycaps_are_never_held_out() -> None:
    names = [f"flag of {number}" for number in range(200)]
    assert {part_of("\N{REGIONAL INDICATOR SYMBOL LETTER A}", name) for name in names} == {"train"}
    assert {part_of("1", f"keycap {number}") for number in range(200)} == {"train"}
    others = [part_of("a", name) for name in names]
    assert 0 < others.count("held_out") < 30
    assert part_of("a", "red apple") == "combinations"


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


@needs_names
def test_skin_tones_are_left_out_and_flags_are_called_so() -> None:
    found = captions()
    assert found["\N{WAVING HAND SIGN}"] == "waving hand"
    assert "\N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4}" not in found
    assert "flag of Japan" in found.values()


@needs_font
def test_a_picture_is_square_and_what_the_font_lacks_has_none() -> None:
    font = ImageFont.truetype(FONT, emoji_pictures.PIXELS)
    apple = draw("\N{RED APPLE}", font)
    assert apple is not None
    assert apple.size == (SIDE_PX, SIDE_PX)
    red, green, _ = apple.getpixel((SIDE_PX // 3, SIDE_PX // 2))
    assert red > 180 > green
    assert draw("\N{LATIN SMALL LETTER A}", font) is None
    assert draw("\N{RED APPLE}\N{RED APPLE}", font) is None
