"""From what is known of a sample to its caption: which text, which of several, its tags, and a template.

Only texts here. The empty caption of unconditional training is drawn by the task, which needs both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cascade_train.data.caption_template import CAPTION, CaptionTemplate
from cascade_train.data.sample import RawSample, UnreadableSampleError, value_of
from cascade_train.data.tags import Tags, drawn, weighted_texts

if TYPE_CHECKING:
    import torch

TEXT = "txt"
"""The name, among keys, of the caption that the source itself reads."""

CHOICES = ("whole", "first", "random")


@dataclass(kw_only=True)
class Captions:
    """Makes a sample's caption, in this order: key, choice, tags, template. The defaults leave it as it is.

    What is drawn is drawn anew each epoch, from the sample's own generator.

    Attributes:
        key: whose text it is: txt (the text beside the picture), a key of the sample's json or columns, or a mapping
            of such keys to weights, of which one that the sample has is drawn. A dot leads into a key, `meta.title`;
            a text on the way is read as json.
        choose: which of several captions, one per line of a text or per element of a list (where `{caption: a cat,
            weight: 2}` is drawn twice as often): whole = a text with all its lines, first, random.
        template: a text in which {caption} or {} stands for the caption and any other {name} for a key of the sample's
            json or columns; of a list of them one is drawn; null = the caption as it is.
        tags: what becomes of a list of tags.
    """

    key: str | dict[str, float] = TEXT
    choose: Literal["whole", "first", "random"] = "whole"
    template: str | list[str] | None = None
    tags: Tags = field(default_factory=Tags)

    def __post_init__(self) -> None:
        self._keys = {self.key: 1.0} if isinstance(self.key, str) else dict(self.key)
        if not self._keys or not all(self._keys) or min(self._keys.values()) <= 0:
            raise ValueError(
                f"data.captions.key={self.key} must be the name of a key, or a mapping of names to weights above 0, as"
                " in {caption: 0.95, txt: 0.05}"
            )
        if self.choose not in CHOICES:
            raise ValueError(f"data.captions.choose={self.choose} is unknown: choose {', '.join(CHOICES)}")
        texts = [self.template] if isinstance(self.template, str) else self.template
        if texts is not None and not texts:
            raise ValueError("data.captions.template=[] holds no template to draw; null takes captions as they are")
        self._templates = [CaptionTemplate(text) for text in texts or [f"{{{CAPTION}}}"]]

    @property
    def is_constant(self) -> bool:
        """Whether a sample has the same caption in every epoch: nothing is drawn."""
        one_of_each = len(self._keys) == 1 and len(self._templates) == 1
        return one_of_each and self.choose != "random" and self.tags.is_constant

    @property
    def changes_nothing(self) -> bool:
        """Whether every caption stays as the source reads it."""
        return self == Captions()

    @property
    def needs_text(self) -> bool:
        """Whether the source's own caption may be asked for."""
        return TEXT in self._keys

    @property
    def needs_values(self) -> bool:
        """Whether more is asked for than the source's own caption, so that it must read a sample's json or columns."""
        named = {name for template in self._templates for name in template.names}
        return bool(self._keys.keys() - {TEXT} or named - {CAPTION}) or self.tags.key is not None

    def __call__(self, raw: RawSample, generator: torch.Generator) -> str:
        """Return the caption of a sample.

        Raises:
            UnreadableSampleError: the sample lacks what is asked for, has something else than text there, or a list of
                captions where `choose` does not say which.
        """
        caption = self.tags.apply(self._chosen(raw, generator), raw.values, generator)
        template = self._templates[drawn([1.0] * len(self._templates), generator)]
        return _encodable(template.fill(caption, raw.values))

    def _chosen(self, raw: RawSample, generator: torch.Generator) -> str:
        """Return the text of one key, one of several where they are to be chosen from."""
        found = {key: value for key in self._keys if (value := _value(raw, key)) is not None}
        if not found:
            raise UnreadableSampleError(f"it lacks {' and '.join(self._keys)}, which data.captions.key names")
        key = list(found)[drawn([self._keys[key] for key in found], generator)]
        value = found[key]
        if isinstance(value, str):
            if self.choose == "whole":
                return value
            texts = [(line.strip(), 1.0) for line in value.splitlines() if line.strip()] or [("", 1.0)]
        elif self.choose == "whole":
            raise UnreadableSampleError(
                f"data.captions.key={key} is no single text but {type(value).__name__}: choose one of several by"
                " data.captions.choose=first or random"
            )
        elif not (texts := weighted_texts(value, key)):
            raise UnreadableSampleError(f"{key} holds no caption")
        position = drawn([weight for _, weight in texts], generator) if self.choose == "random" else 0
        return texts[position][0]


def _encodable(caption: str) -> str:
    """Return a caption that can be written; json may hold halves of characters, which no file and no tokenizer takes.

    Raises:
        UnreadableSampleError: it holds such a half.
    """
    try:
        caption.encode()
    except UnicodeEncodeError as error:
        raise UnreadableSampleError(f"its caption is no Unicode text: {error.reason}") from error
    return caption


def _value(raw: RawSample, key: str) -> Any:
    """Return what a sample has under a key; None = nothing."""
    return raw.caption if key == TEXT else value_of(raw.values, key)
