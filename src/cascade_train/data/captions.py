"""The caption of a sample: which text, which of several, its tags, and a template.

The empty caption of unconditional training is drawn by the task, which needs both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from cascade_train.data.sample import RawSample, UnreadableSampleError, value_of
from cascade_train.data.tags import Tags, draw_index, weighted_texts
from cascade_train.options import check_fields

if TYPE_CHECKING:
    import torch

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
            raise ValueError(
                f"data.captions.key={self.key} must be the name of a key, or a mapping of names to weights above 0, as"
                " in {caption: 0.95, txt: 0.05}"
            )
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
        """Return the caption of a sample; an UnreadableSampleError without key or text."""
        return self.traced(raw, generator)[0]

    def traced(self, raw: RawSample, generator: torch.Generator) -> tuple[str, str]:
        """Return the caption of a sample, and its origin: file or key, and what was drawn or added."""
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
        found = {key: value for key, value in values.items() if value is not None}
        filled = {key: value for key, value in found.items() if not (isinstance(value, str | list) and not value)}
        found = filled or found  # an empty cell of a csv is none
        if not found:
            raise UnreadableSampleError(f"it lacks {' and '.join(self._keys)}, which data.captions.key names")
        key = list(found)[draw_index([self._keys[key] for key in found], generator)]
        value, origin = found[key], raw.caption_from if key == TEXT else f"key {key}"
        if isinstance(value, str):
            if self.choose == "whole":
                return value, origin
            texts = [(line.strip(), 1.0) for line in value.splitlines() if line.strip()] or [("", 1.0)]
        elif self.choose == "whole":
            raise UnreadableSampleError(
                f"data.captions.key={key} is no single text but {type(value).__name__}: choose one of several by"
                " data.captions.choose=first or random"
            )
        elif not (texts := weighted_texts(value, key)):
            raise UnreadableSampleError(f"{key} holds no caption")
        position = draw_index([weight for _, weight in texts], generator) if self.choose == "random" else 0
        return texts[position][0], f"{origin}, one of several" if len(texts) > 1 else origin


def _parsed_template(text: str) -> list[tuple[str, str | None]]:
    """Return texts and the name after each: plain substitution, no attributes, indices or formats."""
    where = f"data.captions.template={text}"
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(
            f"{where} is no template ({error}): write {{caption}} where the caption belongs, and double a brace"
            " that is meant"
        ) from None
    for _, name, specification, conversion in parts:
        if specification or conversion or (name and _NAME.fullmatch(name) is None):
            raise ValueError(
                f"{where}: {{{name}}} must be the plain name of a value, as in {{caption}} or {{artist}};"
                " indices, conversions and formats are not read"
            )
    return [(literal, CAPTION if name == "" else name) for literal, name, _, _ in parts]


def _filled(name: str | None, caption: str, values: Mapping[str, Any]) -> str:
    if name is None:
        return ""
    value = caption if name == CAPTION else value_of(values, name)
    if not isinstance(value, str | int | float):
        raise UnreadableSampleError(f"it has no text or number {name}, which data.captions.template names")
    return str(value)
