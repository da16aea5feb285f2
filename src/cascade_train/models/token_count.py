"""How many tokens captions have, without a text tower and without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

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
    if not _is_here(source, subfolder or ""):
        name = (
            f"the packaged tokenizer, since that of {source} is not on this machine; it finds more tokens than CLIP's"
        )
        return TokenCounter(name=name, tokenizer=CLIPTokenizer.from_pretrained(str(FOLDER)))
    tokenizer = CLIPTokenizer.from_pretrained(source, subfolder=subfolder or "", local_files_only=True)
    return TokenCounter(name=f"the tokenizer of {source}", tokenizer=tokenizer)


def _is_here(source: str, subfolder: str) -> bool:
    """Return whether a folder or the cache has a vocabulary; without one, transformers makes an empty tokenizer."""
    names = [f"{subfolder}/{name}".lstrip("/") for name in VOCABULARIES]
    if Path(source).is_dir():
        return any((Path(source) / name).is_file() for name in names)
    return any(isinstance(try_to_load_from_cache(source, name), str) for name in names)
