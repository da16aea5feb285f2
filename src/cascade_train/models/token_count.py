"""How many tokens captions have, without a text tower and without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cascade_train.files.hub import parse_source

FOLDER = Path(__file__).parent / "tiny_tokenizer"
"""The packaged tokenizer, made by scripts/write_tiny_tokenizer.py."""

VOCABULARIES = ("tokenizer.json", "vocab.json")


@dataclass(frozen=True, kw_only=True)
class TokenCounter:
    """Counts the tokens of captions; `name` describes the tokenizer."""

    name: str
    tokenizer: Any

    def __call__(self, captions: Sequence[str]) -> list[int]:
        """Return how many tokens each caption has, start and end included."""
        if not captions:
            return []
        words = self.tokenizer(list(captions), add_special_tokens=False, verbose=False)["input_ids"]
        return [len(each) + 2 for each in words]


def token_counter(source: str | None, subfolder: str | None) -> TokenCounter:
    """Return a counter with a model's tokenizer where it is on this machine, else with the packaged one.

    `source` is a hub id or local folder, None = the packaged one; `subfolder` a folder within it.
    """
    from transformers import CLIPTokenizer

    if source is None:
        return TokenCounter(name="the packaged tokenizer", tokenizer=CLIPTokenizer.from_pretrained(str(FOLDER)))
    folder = _vocabulary_folder(source, subfolder or "")
    if folder is None:
        name = (
            f"the packaged tokenizer, since that of {source} is not on this machine; it finds more tokens than CLIP's"
        )
        return TokenCounter(name=name, tokenizer=CLIPTokenizer.from_pretrained(str(FOLDER)))
    tokenizer = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
    return TokenCounter(name=f"the tokenizer of {source}", tokenizer=tokenizer)


def _vocabulary_folder(source: str, subfolder: str) -> Path | None:
    """Return the folder with a vocabulary, here or in the hub's cache; of one without, transformers makes its own."""
    on_hub = parse_source(source)
    root = Path(source) if Path(source).is_dir() or on_hub is None else on_hub.folder()
    folder = None if root is None else root / subfolder
    return folder if folder is not None and any((folder / name).is_file() for name in VOCABULARIES) else None
