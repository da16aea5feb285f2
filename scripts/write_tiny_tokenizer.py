"""The packaged tokenizer: a small byte-level BPE in which every word of the shapes captions is one token.

python scripts/write_tiny_tokenizer.py

writes the shipped files; a test compares them.

Format: CLIP's (vocab.json, merges.txt; Radford et al. 2021): 256 bytes, the same bytes as word ends, one token for each
merge, then start and end of text. Any text can be written with it; other words take several tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from cascade_train.models.text_encoder import PACKAGED_TOKENIZER

START, END, WORD_END = "<|startoftext|>", "<|endoftext|>", "</w>"

COLOURS = "red green blue yellow purple orange cyan magenta white black gray pink brown"
SHAPES = "circle square triangle cross star diamond ring"
SIZES = "small large big tiny"
POSITIONS = "top bottom left right center middle upper lower"
OTHERS = "a an the on at in of with shape background and photo picture"
WORDS = " ".join((COLOURS, SHAPES, SIZES, POSITIONS, OTHERS)).split()
"""Words that are one token each, in the order of their merges."""

Merge = tuple[str, str]


def byte_letters() -> list[str]:
    """Return the 256 letters that stand for bytes, printable ones first (the order of GPT-2 and CLIP)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def apply_merges(word: str, merges: list[Merge]) -> list[str]:
    """Split a word into tokens: of all neighbours that have a merge, the oldest merge joins first."""
    pieces = [*word[:-1], word[-1] + WORD_END]
    rank = {merge: i for i, merge in enumerate(merges)}
    while True:
        pairs = [pair for pair in zip(pieces, pieces[1:], strict=False) if pair in rank]
        if not pairs:
            return pieces
        left, right = min(pairs, key=rank.__getitem__)
        joined: list[str] = []
        for piece in pieces:
            if joined and joined[-1] == left and piece == right:
                joined[-1] = left + right
            else:
                joined.append(piece)
        pieces = joined


def merges() -> list[Merge]:
    """Return the merges, oldest first; a word adds what the merges before it do not join yet."""
    found: list[Merge] = []
    for word in WORDS:
        while len(pieces := apply_merges(word, found)) > 1:
            found.append((pieces[0], pieces[1]))
    return found


def vocabulary() -> dict[str, int]:
    """Return token -> id."""
    letters = byte_letters()
    joined = [left + right for left, right in merges()]
    tokens = [*letters, *(letter + WORD_END for letter in letters), *joined, START, END]
    return {token: i for i, token in enumerate(tokens)}


def write(folder: Path) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": END,
    }
    (folder / "vocab.json").write_text(json.dumps(vocabulary(), ensure_ascii=True, indent=0) + "\n", "utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges())]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    write(PACKAGED_TOKENIZER)
