"""One sample between source and batch, limits of its files, and of unreadable samples."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cascade_train.errors import RunError
from cascade_train.files.untrusted import open_regular, read_json
from cascade_train.redaction import LONGEST_NAME, LONGEST_REASON, shortened

FEW = 3
"""Unreadable samples that any share allows, while they are at most half of all: few samples say little."""

PICTURES = ("image", "mask")
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP}
"""Errors of a file that was removed or closed to this user; others are those of a disk or a network."""


class UnreadableSampleError(RunError):
    """The content of one sample is damaged; another sample stands in for it, and it is counted."""


@dataclass(frozen=True, kw_only=True)
class RawSample:
    """A sample as its source returns it for one row of its index."""

    image: bytes | np.ndarray | None  # encoded (jpg, png, webp), or (H, W, 3) uint8 RGB; None = see `tensors`
    caption: str  # the text, without dropout
    key: str  # where the sample came from, for messages
    weight: float = 1.0  # of its loss
    caption_from: str = "its source"  # where the caption was found: a kind of file, a column
    mask: bytes | np.ndarray | None = None  # of the loss: encoded, of the image's size, or (H, W) uint8; None = all
    values: Mapping[str, Any] = field(default_factory=dict)  # its json, its columns, for captions and their templates
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)  # arrays of a cache for the batch, by name

    def __post_init__(self) -> None:
        for name, value, wanted, ends in (("image", self.image, "(H, W, 3)", (3,)), ("mask", self.mask, "(H, W)", ())):
            shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", "no dtype")
            is_array = dtype == np.uint8 and len(shape) == 2 + len(ends) and shape[2:] == ends
            if not (value is None or isinstance(value, bytes) or is_array):
                kind = f"{type(value).__name__}, {dtype}, {shape}"
                raise RunError(f"RawSample.{name} must be the bytes of a picture, or uint8 {wanted}, and is a {kind}.")
        if not isinstance(self.caption, str) or not isinstance(self.key, str):
            raise RunError(f"RawSample.caption={self.caption!r} and key={self.key!r} must be texts.")


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """Value under a key, else where its dots lead, `meta.title`, through json texts; None = there is none."""
    if key in values:
        return values[key]
    value: Any = values
    for name in key.split("."):
        if isinstance(value, str):
            try:
                value = read_json(value)
            except ValueError:
                return None
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True, kw_only=True)
class FileLimits:
    """Sizes above which a file of a sample counts as unreadable: data from elsewhere may have any size."""

    max_file_mib: int | None  # of a picture or a mask, in MiB; None = any
    max_text_kib: int | None  # of a caption, a json or a yaml, in KiB; None = any

    def check(self, part: str, size: int) -> None:
        """Check the size in bytes of a part: "image", "mask", or else a text."""
        key = "max_file_mib" if part in PICTURES else "max_text_kib"
        limit = getattr(self, key)
        if limit is not None and size > limit * (1024**2 if part in PICTURES else 1024):
            raise UnreadableSampleError(f"its {part} has {size} bytes, more than data.{key}={limit} allows")

    def read(self, path: Path, part: str) -> bytes:
        """Read a whole file; an UnreadableSampleError where it is larger than allowed, gone, or no plain file.

        An OSError where the disk or the network fails: that is no fault of the sample.
        """
        try:
            with open_regular(path) as file:
                self.check(part, os.fstat(file.fileno()).st_size)
                return file.read()
        except OSError as error:
            if error.errno not in _GONE:
                raise
            raise UnreadableSampleError(f"its {part} is gone or may not be read: {error.strerror}") from error
        except ValueError as error:  # what a table names
            raise UnreadableSampleError(f"its {part} is no plain file: {error}") from error


def caption_text(content: bytes) -> str:
    """The caption in a text file; an UnreadableSampleError where it is not UTF-8."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in content:
        raise UnreadableSampleError("the caption is UTF-16 or another wide encoding; save it as UTF-8")
    try:
        return content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise UnreadableSampleError(f"the caption is not UTF-8: {error}; save it as UTF-8") from error


def most_unreadable(samples: int, max_share: float) -> float:
    """How many unreadable samples do not stop a run: a share, or a few."""
    return max(min(FEW, samples // 2), max_share * samples)


def too_many_text(count: int, samples: int, max_share: float, listed: str) -> str:
    """That too many samples are unreadable, and the remedies: among them a share that would do."""
    return (
        f"{count} of {samples} samples are unreadable, more than data.max_unreadable_share={max_share:g} allows:"
        f" {listed}. Remove or replace them, or allow as many by"
        f" data.max_unreadable_share={sufficient_share(count, samples):g}."
    )


def sufficient_share(count: int, samples: int) -> float:
    """Least share, in whole percent, that allows as many unreadable samples."""
    return min(1.0, math.ceil(100 * count / samples) / 100)


def by_reason(unreadable: Iterable[tuple[str, str]]) -> str:
    """Samples, each a name and why it could not be used, for a message: those of one reason together."""
    names: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(unreadable):
        names.setdefault(reason, []).append(shortened(name, LONGEST_NAME))
    return "; ".join(f"{', '.join(same)} ({shortened(reason, LONGEST_REASON)})" for reason, same in names.items())
