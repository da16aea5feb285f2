"""What the files of one sample in a tar mean. Where they lie and how they are read is decided elsewhere."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from cascade_train.data.index.row_filter import read_metadata
from cascade_train.data.sample import RawSample, UnreadableSampleError
from cascade_train.redaction import LONGEST_NAME, printable, shortened

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
PARTS = {"caption": "txt", "json": "json", "mask": "mask.png"}
"""What is read of a sample beside its picture, by its extension."""


@dataclass(kw_only=True)
class Dropped:
    """What a shard holds besides usable samples.

    Attributes:
        without_caption: keys with a picture but no caption.
        without_image: keys with neither jpg, jpeg, png nor webp.
        examples: the first keys of either kind, with their extensions.
        caption: extension of the files that hold captions.
    """

    without_caption: int = 0
    without_image: int = 0
    examples: list[str] = field(default_factory=list)
    caption: str = PARTS["caption"]

    def text(self) -> str:
        """Say how many and which."""
        return (
            f"{self.without_caption} keys with a picture but no caption (.{self.caption}), {self.without_image} keys"
            f" without a picture (.{', .'.join(IMAGE_EXTENSIONS)}); found: {'; '.join(self.examples) or 'none'}"
        )

    def count(self, key: str, extensions: Iterable[str], *, no_image: bool) -> None:
        """Note the files of a key that are no usable sample, for want of a picture or else of a caption."""
        self.without_image += no_image
        self.without_caption += not no_image
        if len(self.examples) < 5:
            found = f"{key} ({', '.join(sorted(extensions))})"
            self.examples.append(printable(shortened(found, LONGEST_NAME)))


def image_extension(extensions: Container[str]) -> str | None:
    """Return which of a sample's files is its picture; None = there is none."""
    return next((extension for extension in IMAGE_EXTENSIONS if extension in extensions), None)


def raw_sample(parts: Mapping[str, bytes], key: str, *, needs_values: bool) -> RawSample:
    """Return the sample that these files make.

    Args:
        parts: bytes of the picture ("image"), the caption, and, where they are there, the json and the mask.
        key: names the sample in messages.
        needs_values: whether captions are made from the json.

    Raises:
        UnreadableSampleError: the caption is no text, or a json that is there and needed cannot be read.
    """
    values = read_metadata(parts["json"]) if needs_values and "json" in parts else {}
    if values is None:
        raise UnreadableSampleError("it has no readable json, which data.captions asks for")
    try:
        caption = parts["caption"].decode().strip()
    except UnicodeDecodeError as error:
        raise UnreadableSampleError(f"the caption is not UTF-8: {error}") from error
    return RawSample(image=parts["image"], caption=caption, key=key, values=values, mask=parts.get("mask"))
