"""The caption of a sample: which text, which of several, its tags, and a template.

The empty caption of unconditional training is drawn by the task, which needs both.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from cascade_train.data.sample import RawSample, UnreadableSampleError, value_of
from cascade_train.options import check_fields, check_least
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
            raise ValueError(f"{where}drop_prob={self.drop_prob} is a share of the tags: at least 0 and below 1")
        for name, least in (("max_tags", max(1, self.keep_first)), ("max_characters", 1)):
            check_least(f"{where}{name}", getattr(self, name), least, "it must leave room for keep_first; null = off")
        if self.keep_first and not (self.shuffle or self.drop_prob):
            raise ValueError(f"{where}keep_first={self.keep_first} needs {where}shuffle=true or {where}drop_prob")
        if self.separator is None and self.key is None:
            acting = [name for name in _ACTING if getattr(self, name) != getattr(Tags, name)]
            if acting:
                value = getattr(self, acting[0])
                raise ValueError(f"{where}{acting[0]}={value} finds no tags: set {where}separator or {where}key")
        self._separator = "," if self.separator is None else self.separator
        self._joint = f"{self._separator.strip()} "

    @property
    def is_constant(self) -> bool:
        """Whether nothing is drawn."""
        return not self.shuffle and self.drop_prob == 0.0

    def apply(self, caption: str, values: Mapping[str, Any], generator: torch.Generator) -> str:
        """Caption with its tags shuffled, dropped and truncated; an UnreadableSampleError where there are no tags."""
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
    """Texts with their weights, else 1, of a list or a mapping; see `Tags`."""
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        entries = [_entry(entry) for entry in value]
    else:
        raise UnreadableSampleError(f"{key} is {type(value).__name__}, not a list of texts")
    for text, weight in entries:
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (isinstance(text, str) and number and 0 < weight <= sys.float_info.max):
            shown = shortened(f"{text}, {weight}", LONGEST_NAME)
            raise UnreadableSampleError(f"{key} holds neither texts nor texts with a weight above 0: {shown}")
    return [(text.strip(), float(weight)) for text, weight in entries if text.strip()]


def draw_index(weights: Sequence[float], generator: torch.Generator) -> int:
    """A position, drawn in proportion to the weights; of one position nothing is drawn."""
    if len(weights) == 1:
        return 0
    return max(range(len(weights)), key=_races(weights, generator).__getitem__)


def _races(weights: Sequence[float], generator: torch.Generator) -> list[float]:
    """A score per weight; each is the largest with probability in proportion (Efraimidis and Spirakis 2006)."""
    draws = _uniform(len(weights), generator)
    return [math.log1p(-u) / weight for u, weight in zip(draws, weights, strict=True)]


def _uniform(count: int, generator: torch.Generator) -> list[float]:
    import torch  # seconds to import; a configuration is checked before

    return torch.rand(count, generator=generator, dtype=torch.float64).tolist()


def _entry(value: Any) -> tuple[Any, Any]:
    """Text and weight of a list's element; anything else as it is, refused later."""
    if not isinstance(value, Mapping):
        return value, 1.0
    others = [item for name, item in value.items() if name != "weight"]
    return (others[0] if len(others) == 1 else dict(value)), value.get("weight", 1.0)


TEXT = "txt"
"""The key of the caption that the source itself reads."""

CAPTION = "caption"
"""The name of the caption in a template, which `{}` means too."""

_NAME = re.compile(r"[^\W\d][\w-]*([.][^\W\d][\w-]*)*")


@dataclass(kw_only=True)
class Captions:
    """Makes a sample's caption, in this order: key, choice, tags, template. The defaults leave it as it is.

    What is drawn is drawn anew each epoch, from the sample's own generator. Of the keys of a mapping one that the
    sample has is drawn. Of a list of captions, `{caption: a cat, weight: 2}` is drawn twice as often. In a template
    {caption} or {} stands for the caption and any other {name} for a key of the sample's json or columns.
    """

    key: str | dict[str, float] = TEXT
    choose: Literal["whole", "first", "random"] = "whole"
    template: str | list[str] | None = None
    tags: Tags = field(default_factory=Tags)

    def __post_init__(self) -> None:
        check_fields(self, "data.captions.")
        self._keys = {self.key: 1.0} if isinstance(self.key, str) else dict(self.key)
        if not self._keys or not all(self._keys) or min(self._keys.values()) <= 0:
            raise ValueError(f"data.captions.key={self.key} must be a key, or a mapping of keys to weights above 0")
        texts = [self.template] if isinstance(self.template, str) else self.template
        if texts is not None and not texts:
            raise ValueError("data.captions.template=[] holds no template to draw; null takes captions as they are")
        self._templates = [_parsed_template(text) for text in texts or [f"{{{CAPTION}}}"]]

    @property
    def is_constant(self) -> bool:
        """Whether a sample has the same caption in every epoch: nothing is drawn."""
        one_of_each = len(self._keys) == 1 and len(self._templates) == 1
        return one_of_each and self.choose != "random" and self.tags.is_constant

    @property
    def needs_text(self) -> bool:
        """Whether the source's own caption may be used."""
        return TEXT in self._keys

    @property
    def needs_values(self) -> bool:
        """Whether a sample's json or columns are needed beside the source's own caption."""
        named = {name for template in self._templates for _, name in template if name is not None}
        return bool(self._keys.keys() - {TEXT} or named - {CAPTION}) or self.tags.key is not None

    def __call__(self, raw: RawSample, generator: torch.Generator) -> str:
        """Caption of a sample; an UnreadableSampleError without key or text."""
        return self.traced(raw, generator)[0]

    def traced(self, raw: RawSample, generator: torch.Generator) -> tuple[str, str]:
        """Caption of a sample, and its origin: file or key, and what was drawn or added."""
        chosen, origin = self._chosen(raw, generator)
        caption = self.tags.apply(chosen, raw.values, generator)
        place = draw_index([1.0] * len(self._templates), generator)
        caption = "".join(literal + _filled(name, caption, raw.values) for literal, name in self._templates[place])
        try:
            caption.encode()
        except UnicodeEncodeError as error:  # json may hold halves of characters, which no file and no tokenizer takes
            raise UnreadableSampleError(f"its caption is no Unicode text: {error.reason}") from error
        tagged = ["tags shuffled or dropped"] if not self.tags.is_constant else []
        filled = [f"template {place + 1} of {len(self._templates)}"] if self.template is not None else []
        return caption, ", ".join([origin, *tagged, *filled])

    def _chosen(self, raw: RawSample, generator: torch.Generator) -> tuple[str, str]:
        values = {key: raw.caption if key == TEXT else value_of(raw.values, key) for key in self._keys}
        present = {key: value for key, value in values.items() if value is not None}
        filled = {key: value for key, value in present.items() if not (isinstance(value, str | list) and not value)}
        present = filled or present  # an empty cell of a csv is none
        if not present:
            raise UnreadableSampleError(f"it lacks {' and '.join(self._keys)}, which data.captions.key names")
        key = list(present)[draw_index([self._keys[key] for key in present], generator)]
        value, origin = present[key], raw.caption_from if key == TEXT else f"key {key}"
        if isinstance(value, str):
            if self.choose == "whole":
                return value, origin
            texts = [(line.strip(), 1.0) for line in value.splitlines() if line.strip()] or [("", 1.0)]
        elif self.choose == "whole":
            text = f"data.captions.key={key} is no single text but {type(value).__name__}"
            raise UnreadableSampleError(f"{text}: choose one by data.captions.choose=first or random")
        elif not (texts := weighted_texts(value, key)):
            raise UnreadableSampleError(f"{key} holds no caption")
        position = draw_index([weight for _, weight in texts], generator) if self.choose == "random" else 0
        return texts[position][0], f"{origin}, one of several" if len(texts) > 1 else origin


def _parsed_template(text: str) -> list[tuple[str, str | None]]:
    """Texts and the name after each: plain substitution, no attributes, indices or formats."""
    where = f"data.captions.template={text}"
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{where} is no template ({error}): write {{caption}}, and {{{{ for a brace") from None
    for _, name, specification, conversion in parts:
        if specification or conversion or (name and _NAME.fullmatch(name) is None):
            raise ValueError(f"{where}: {{{name}}} must be the plain name of a value, as in {{caption}} or {{artist}}")
    return [(literal, CAPTION if name == "" else name) for literal, name, _, _ in parts]


def _filled(name: str | None, caption: str, values: Mapping[str, Any]) -> str:
    if name is None:
        return ""
    value = caption if name == CAPTION else value_of(values, name)
    if not isinstance(value, str | int | float):
        raise UnreadableSampleError(f"it has no text or number {name}, which data.captions.template names")
    return str(value)
