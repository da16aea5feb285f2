"""Captions that are lists of tags: shuffled by weight, dropped and truncated."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cascade_train.data.sample import UnreadableSampleError, value_of
from cascade_train.options import check_least
from cascade_train.redaction import LONGEST_NAME, shortened

if TYPE_CHECKING:
    import torch

Weighted = tuple[str, float]
_ACTING = ("keep_first", "shuffle", "drop_prob", "max_tags", "max_characters")


@dataclass(kw_only=True)
class Tags:
    """What becomes of a caption's tags. The defaults leave a caption as it is.

    `key` names a list of texts or of `{tag: smiling, weight: 0.8}`, or a mapping of tags to weights: in a shuffle, a
    tag of twice the weight comes first twice as often.
    """

    separator: str | None = None
    key: str | None = None
    keep_first: int = 0
    shuffle: bool = False
    drop_prob: float = 0.0
    max_tags: int | None = None
    max_characters: int | None = None

    def __post_init__(self) -> None:
        where = "data.captions.tags."
        if self.separator == "" or self.key == "":
            raise ValueError(f"{where}separator and key are texts; null, not an empty text, means none")
        check_least("data.captions.tags.keep_first", self.keep_first, 0, "it is a number of tags")
        if not 0.0 <= self.drop_prob < 1.0:
            raise ValueError(
                f"{where}drop_prob={self.drop_prob} is a share of the tags: at least 0 and below 1; whole captions are"
                " dropped by task.cond_drop_prob"
            )
        for name, least in (("max_tags", max(1, self.keep_first)), ("max_characters", 1)):
            check_least(f"{where}{name}", getattr(self, name), least, "it must leave room for keep_first; null = off")
        if self.keep_first and not (self.shuffle or self.drop_prob):
            raise ValueError(
                f"{where}keep_first={self.keep_first} has nothing to keep tags from: set {where}shuffle=true or"
                f" {where}drop_prob, or leave it 0"
            )
        if self.separator is None and self.key is None:
            acting = [name for name in _ACTING if getattr(self, name) != getattr(Tags, name)]
            if acting:
                raise ValueError(
                    f"{where}{acting[0]}={getattr(self, acting[0])} finds no tags: set {where}separator, or {where}key"
                    " to the key that lists them"
                )
        self._separator = "," if self.separator is None else self.separator
        self._joint = f"{self._separator.strip()} "

    @property
    def is_constant(self) -> bool:
        """Whether nothing is drawn."""
        return not self.shuffle and self.drop_prob == 0.0

    def apply(self, caption: str, values: Mapping[str, Any], generator: torch.Generator) -> str:
        """Return the caption with its tags shuffled, dropped and truncated; the generator is the sample's own.

        An UnreadableSampleError where the value under the key is not a list of tags.
        """
        if self.separator is None and self.key is None:
            return caption
        head, tags = ([caption], []) if self.separator is None else ([], self._split(caption))
        listed = None if self.key is None else value_of(values, self.key)
        if listed is not None:
            tags += self._split(listed) if isinstance(listed, str) else weighted_texts(listed, str(self.key))
        kept, rest = tags[: self.keep_first], tags[self.keep_first :]
        if self.drop_prob > 0.0:
            rest = [tag for tag, u in zip(rest, _uniform(len(rest), generator), strict=True) if u >= self.drop_prob]
        if self.shuffle:  # each next one is drawn by weight from the rest
            races = _races([weight for _, weight in rest], generator)
            rest = [rest[i] for i in sorted(range(len(rest)), key=races.__getitem__, reverse=True)]
        words = [word for word in [*head, *(tag for tag, _ in kept)] if word]
        room = None if self.max_tags is None else self.max_tags - len(kept)
        return self._joined(words, [tag for tag, _ in rest[:room]])

    def _split(self, text: str) -> list[Weighted]:
        return [(tag, 1.0) for part in text.split(self._separator) if (tag := part.strip())]

    def _joined(self, words: list[str], tags: list[str]) -> str:
        room = math.inf if self.max_characters is None else self.max_characters + len(self._joint)
        room -= sum(len(self._joint) + len(word) for word in words)
        for tag in tags:
            room -= len(self._joint) + len(tag)
            if room < 0:
                break
            words.append(tag)
        return self._joint.join(words)


def weighted_texts(value: Any, key: str) -> list[Weighted]:
    """Return texts with their weights, else 1, of a list or a mapping; see `Tags`."""
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        entries = [_entry(each) for each in value]
    else:
        raise UnreadableSampleError(f"{key} is {type(value).__name__}, not a list of texts")
    for text, weight in entries:
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (isinstance(text, str) and number and 0 < weight <= sys.float_info.max):
            shown = shortened(f"{text}, {weight}", LONGEST_NAME)
            raise UnreadableSampleError(f"{key} holds neither texts nor texts with a weight above 0: {shown}")
    return [(text.strip(), float(weight)) for text, weight in entries if text.strip()]


def draw_index(weights: Sequence[float], generator: torch.Generator) -> int:
    """Return a position, drawn in proportion to the weights; of one position nothing is drawn."""
    if len(weights) == 1:
        return 0
    return max(range(len(weights)), key=_races(weights, generator).__getitem__)


def _races(weights: Sequence[float], generator: torch.Generator) -> list[float]:
    """Return a score per weight; each is the largest with probability in proportion (Efraimidis and Spirakis 2006)."""
    draws = _uniform(len(weights), generator)
    return [math.log1p(-u) / weight for u, weight in zip(draws, weights, strict=True)]


def _uniform(count: int, generator: torch.Generator) -> list[float]:
    import torch  # seconds to import; a configuration is checked before

    return torch.rand(count, generator=generator, dtype=torch.float64).tolist()


def _entry(value: Any) -> tuple[Any, Any]:
    """Return text and weight of a list's element; anything else as it is, refused later."""
    if not isinstance(value, Mapping):
        return value, 1.0
    others = [each for name, each in value.items() if name != "weight"]
    return (others[0] if len(others) == 1 else dict(value)), value.get("weight", 1.0)
