"""Captioned pictures that nobody here drew: Noto Color Emoji with their names, for docs/tutorial.md.

    python scripts/emoji_pictures.py --out emoji

needs Debian's package fonts-noto-color-emoji (the font, under the SIL Open Font License 1.1) and PyPI's package emoji
(the names). Skin tones are left out, since a name has five of them that differ by a tint; flags and keycaps stay, and
men, women and persons who do the same. What the font lacks is left out and counted.

Writes `train`, `held_out` and `combinations`: a PNG of 96 x 96 pixels on white and its caption in a text file for each;
and `tokenizer`, a byte-level BPE of the training captions, in which each of their words is one token.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, features

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
PIXELS = 109
"""The one size of the font's bitmaps, which are 136 x 128 pixels, 4 of them empty at both sides."""

DRAWN_PX, SIDE_PX = 128, 96
"""Sides as the font draws, and of the pictures: what the tiny models train at."""
WORDS = 8192
"""Most tokens of the tokenizer; every word of the captions fits."""

HELD_OUT_SHARE = 20
"""One in so many pictures is held out, by a hash of its caption."""

COMBINATIONS = (
    *("red apple", "blue heart", "orange square", "green book", "purple circle", "brown square", "yellow heart"),
    *("black cat", "orange heart", "blue square", "small orange diamond", "large blue diamond", "green circle"),
    *("woman firefighter", "man mechanic", "woman scientist", "man artist", "woman in tuxedo", "man dancing"),
    *("cat with tears of joy", "pouting cat", "two-thirty", "nine o’clock", "down-left arrow", "crying face"),
)
"""Held-out names each word of which is in a training caption: red hearts and green apples are there, no red apple."""


def missing(font: Path = FONT) -> str | None:
    """Return what has to be installed first, None where all is there."""
    wanted = []
    if not font.is_file():
        wanted.append(
            "the font: apt-get install fonts-noto-color-emoji, or give the path of NotoColorEmoji.ttf by --font"
        )
    try:
        from emoji import EMOJI_DATA  # noqa: F401 # a folder of that name would be found, too
    except ImportError:
        wanted.append("the names: pip install emoji")
    if not features.check("raqm"):
        wanted.append("a Pillow with raqm, which joins the parts of an emoji: the wheels of PyPI have it")
    return "; ".join(wanted) or None


def is_tone(sign: str) -> bool:
    """Return whether a character is one of the five skin tones."""
    return 0x1F3FB <= ord(sign) <= 0x1F3FF


def is_flag(emoji: str) -> bool:
    """Return whether an emoji is the flag of a country or of a region."""
    return any(0x1F1E6 <= ord(sign) <= 0x1F1FF or 0xE0020 <= ord(sign) <= 0xE007F for sign in emoji)


def captions() -> dict[str, str]:
    """Return the caption of each emoji without a skin tone, in the order of their code points."""
    from emoji import EMOJI_DATA, STATUS

    found = {}
    for emoji, facts in sorted(EMOJI_DATA.items()):
        if facts["status"] != STATUS["fully_qualified"] or any(map(is_tone, emoji)):
            continue
        name = facts["en"].strip(":").replace("_", " ")
        found[emoji] = f"flag of {name}" if is_flag(emoji) else name
    return found


def draw(emoji: str, font: ImageFont.FreeTypeFont) -> Image.Image | None:
    """Return the picture of an emoji on white, None where the font has none, or draws it as several."""
    if font.getlength(emoji) != font.getlength("\N{GRINNING FACE}"):
        return None
    left, top, right, bottom = font.getbbox(emoji)
    glyph = Image.new("RGBA", (int(right - left), int(bottom - top)), (255, 255, 255, 0))
    ImageDraw.Draw(glyph).text((-left, -top), emoji, font=font, embedded_color=True)
    if glyph.getchannel("A").getbbox() is None:
        return None
    picture = Image.new("RGB", (DRAWN_PX, DRAWN_PX), "white")
    picture.paste(glyph, ((DRAWN_PX - glyph.width) // 2, (DRAWN_PX - glyph.height) // 2), glyph)
    return picture.resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS)


def part_of(emoji: str, caption: str) -> str:
    """Return whether an emoji is to train, or held out, and with which others."""
    if caption in COMBINATIONS:
        return "combinations"
    names_nothing = is_flag(emoji) or caption.startswith("keycap")  # no other word of the caption tells the picture
    hashed = int.from_bytes(hashlib.sha256(caption.encode()).digest()[:8])
    return "held_out" if hashed % HELD_OUT_SHARE == 0 and not names_nothing else "train"


def one_in(every: int, found: Mapping[str, str]) -> dict[str, str]:
    """Return one in so many of each part, and all combinations."""
    parts: dict[str, list[str]] = {}
    for emoji, caption in found.items():
        parts.setdefault(part_of(emoji, caption), []).append(emoji)
    return {emoji: found[emoji] for part in parts for emoji in parts[part][:: 1 if part == "combinations" else every]}


def write_tokenizer(captions: Iterable[str], folder: Path) -> int:
    """Train a tokenizer of CLIP's kind on captions, write it, and return how many tokens it has."""
    from transformers import CLIPTokenizer

    from cascade_train.models.text_encoder import PACKAGED_TOKENIZER

    packaged = CLIPTokenizer.from_pretrained(str(PACKAGED_TOKENIZER))
    trained = packaged.train_new_from_iterator([captions], vocab_size=WORDS, show_progress=False)
    trained.save_pretrained(str(folder))
    return len(trained)


def write(found: Mapping[str, str], font: ImageFont.FreeTypeFont, out: Path) -> dict[str, list[str]]:
    """Write each picture with its caption, and return the captions of each part, and those that the font lacks."""
    parts: dict[str, list[str]] = {"train": [], "held_out": [], "combinations": [], "lacking": []}
    for emoji, caption in found.items():
        picture = draw(emoji, font)
        part = "lacking" if picture is None else part_of(emoji, caption)
        parts[part].append(caption)
        if picture is not None:
            stem = out / part / "-".join(f"{ord(sign):x}" for sign in emoji)
            picture.save(stem.with_suffix(".png"))
            stem.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
    return parts


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pictures and the tokenizer, say how many there are, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("emoji"), help="folder, which must not be there yet")
    parser.add_argument("--font", type=Path, default=FONT, help="NotoColorEmoji.ttf with bitmaps (CBDT)")
    parser.add_argument("--every", type=int, default=1, help="draw one in so many, and all combinations: a first try")
    args = parser.parse_args(argv)
    if (wanted := missing(args.font)) is not None:
        print(f"Install {wanted}", file=sys.stderr)
        return 2
    for part in ("train", "held_out", "combinations"):
        (args.out / part).mkdir(parents=True)
    parts = write(one_in(args.every, captions()), ImageFont.truetype(args.font, PIXELS), args.out)
    tokens = write_tokenizer(parts["train"], args.out / "tokenizer")
    counts = ", ".join(f"{len(names)} {part}" for part, names in parts.items())
    print(f"{args.out}: {counts}; a tokenizer of {tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
