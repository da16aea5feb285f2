"""How large the files of a sample may be before they are not read at all.

Data from elsewhere may claim any size; a worker that reads it whole runs out of memory. Which picture is too large once
it is decoded is decided in decoding/decode.py.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from cascade_train.data.sample import UnreadableSampleError

PICTURES = ("image", "mask")


@dataclass(frozen=True, kw_only=True)
class FileLimits:
    """Sizes above which a file of a sample counts as unreadable.

    Attributes:
        max_file_mib: of a picture or a mask, in MiB; None = any.
        max_text_kib: of a caption, a json or a yaml, in KiB; None = any.
    """

    max_file_mib: int | None
    max_text_kib: int | None

    @property
    def text_bytes(self) -> int | None:
        """The largest caption, json or yaml, in bytes."""
        return None if self.max_text_kib is None else self.max_text_kib * 1024

    def check(self, part: str, size: int) -> None:
        """Check a file by its size.

        Args:
            part: "image" or "mask", else it is a text: "caption", "json".
            size: in bytes.

        Raises:
            UnreadableSampleError: it is larger than allowed.
        """
        key = "max_file_mib" if part in PICTURES else "max_text_kib"
        limit = getattr(self, key)
        if limit is not None and size > limit * (1024**2 if part in PICTURES else 1024):
            raise UnreadableSampleError(f"its {part} has {size} bytes, more than data.{key}={limit} allows")

    def read(self, path: Path, part: str) -> bytes:
        """Read a whole file.

        Raises:
            UnreadableSampleError: it is larger than allowed, no plain file, since a device may have no end, or no name
                of a file.
            OSError: it cannot be read.
        """
        try:
            found = path.stat()
        except ValueError as error:  # what a table names
            raise UnreadableSampleError(f"its {part} has a name that no file can have: {error}") from error
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableSampleError(f"its {part} is no plain file")
        self.check(part, found.st_size)
        return path.read_bytes()
