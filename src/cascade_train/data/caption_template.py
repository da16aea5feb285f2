"""A text with named places, filled with a sample's values by plain substitution: no attributes, indices or formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from cascade_train.data.sample import UnreadableSampleError, value_of

CAPTION = "caption"
"""The place of the caption, which `{}` means too."""

_NAME = re.compile(r"[^\W\d][\w-]*([.][^\W\d][\w-]*)*")


class CaptionTemplate:
    """A parsed template.

    Args:
        text: `a photo of {}`, `{caption}, by {artist}`; doubled braces stand for themselves.

    Raises:
        ValueError: braces that do not match, or something else than a name in them.

    Attributes:
        names: of the values that it asks for, in order.
    """

    def __init__(self, text: str) -> None:
        where = f"data.captions.template={text}"
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise ValueError(
                f"{where} is no template ({error}): write {{caption}} where the caption belongs, and double a brace"
                " that is meant"
            ) from None
        self._parts: list[tuple[str, str | None]] = []
        for literal, name, specification, conversion in parts:
            if specification or conversion or (name and _NAME.fullmatch(name) is None):
                raise ValueError(
                    f"{where}: {{{name}}} must be the plain name of a value, as in {{caption}} or {{artist}};"
                    " indices, conversions and formats are not read"
                )
            self._parts.append((literal, CAPTION if name == "" else name))
        self.names = [name for _, name in self._parts if name is not None]

    def fill(self, caption: str, values: Mapping[str, Any]) -> str:
        """Return the text with its places filled.

        Raises:
            UnreadableSampleError: a name that is neither a text nor a number of the sample's.
        """
        return "".join(
            literal + ("" if name is None else caption if name == CAPTION else _text(name, values))
            for literal, name in self._parts
        )


def _text(name: str, values: Mapping[str, Any]) -> str:
    value = value_of(values, name)
    if not isinstance(value, str | int | float):
        raise UnreadableSampleError(f"it has no text or number {name}, which data.captions.template names")
    return str(value)
