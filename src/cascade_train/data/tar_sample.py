"""What the files of one sample in a tar mean. Where they lie and how they are read is decided elsewhere."""

from __future__ import annotations

from collections.abc import Container, Mapping

from cascade_train.data.row_filter import read_metadata
from cascade_train.data.sample import RawSample, UnreadableSampleError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
PARTS = {"caption": "txt", "json": "json", "mask": "mask.png"}
"""What is read of a sample beside its picture, by its extension."""


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
        UnreadableSampleError: the caption is no text, or a json that is needed cannot be read.
    """
    values = read_metadata(parts.get("json")) if needs_values else {}
    if values is None:
        raise UnreadableSampleError("it has no readable json, which data.captions asks for")
    try:
        caption = parts["caption"].decode().strip()
    except UnicodeDecodeError as error:
        raise UnreadableSampleError(f"the caption is not UTF-8: {error}") from error
    return RawSample(image=parts["image"], caption=caption, key=key, values=values, mask=parts.get("mask"))
