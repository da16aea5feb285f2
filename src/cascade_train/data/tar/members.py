"""The members of one tar, read forward from a file that need not seek, and grouped into samples by key.

Nothing is ever unpacked: names are keys, not paths. What is done with a member's bytes is the caller's business.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, TypeVar

from cascade_train.errors import ConfigError
from cascade_train.redaction import LONGEST_NAME, printable, shortened

_LONGEST_HEADER = 1024**2  # of names and pax records, which tarfile reads as a whole
_LONGEST_PADDING = 1024**2  # tar fills up to a multiple of its record, mostly 10 KiB
_SKIP_BYTES = 1024**2
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A regular file of a tar.

    Attributes:
        key: what the files of a sample have in common.
        extension: what follows the key, lower case: "jpg".
        start: its first byte in the tar.
        size: in bytes.
        read: return its first bytes, as many as asked for or as there are. Only before the next member is asked for;
            each call goes on where the last one ended.
    """

    key: str
    extension: str
    start: int
    size: int
    read: Callable[[int], bytes]


class Forward:
    """A file that is read from its beginning to its end, whether it can seek or not.

    Attributes:
        position: the next byte's place.
    """

    def __init__(self, file: IO[bytes], *, seekable: bool) -> None:
        """Store; skips seek where the file can."""
        self.position = 0
        self._file, self._seekable = file, seekable

    def tell(self) -> int:
        """Return the position."""
        return self.position

    def seek(self, position: int) -> None:
        """Go on at a later position."""
        assert position >= self.position, f"{position} lies before {self.position}"
        if self._seekable:
            self._file.seek(position)
            self.position = position
        while self.position < position and self.payload(min(_SKIP_BYTES, position - self.position)):
            pass

    def read(self, size: int) -> bytes:
        """Read what tarfile asks for: headers.

        Raises:
            tarfile.ReadError: a header claims to be longer than any honest one.
        """
        if size > _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header at byte {self.position} claims {size} bytes")
        return self.payload(size)

    def payload(self, size: int) -> bytes:
        """Read `size` bytes, fewer where the file ends."""
        parts = []
        while size > 0 and (part := self._file.read(size)):
            parts.append(part)
            size -= len(part)
            self.position += len(part)
        return b"".join(parts)


def samples(name: str, file: Forward, take: Callable[[Member], T]) -> Iterator[tuple[str, dict[str, T]]]:
    """Yield each key with what `take` makes of its files, by extension. Files of a key must be neighbours.

    Args:
        name: of the tar, for messages.
        file: the tar, at its beginning.
        take: called with each file once, while its bytes can be read.

    Raises:
        ConfigError: the tar is damaged or cut short, or a key's files are not neighbours.
    """
    seen: set[str] = set()
    current, parts = "", dict[str, T]()
    for member in _members(name, file):
        if member.key != current and parts:
            yield current, parts
            parts = {}
        if (member.key != current and member.key in seen) or member.extension in parts:
            key = printable(shortened(member.key, LONGEST_NAME))
            raise ConfigError(
                f"data.urls: {name}: the files of key {key} are not next to each other, or one is there"
                " twice; write the tar with tar --sort=name -cf dataset.tar dataset/"
            )
        seen.add(member.key)
        current, parts[member.extension] = member.key, take(member)
    if parts:
        yield current, parts


def _members(name: str, file: Forward) -> Iterator[Member]:
    """Yield each regular file that has an extension."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:  # type: ignore[call-overload] # it needs no more than this
            for entry in tar:
                tar.members = []  # tarfile keeps every header otherwise
                named = key_and_extension(entry.name)
                if named is not None and entry.isreg() and not entry.issparse():
                    yield _member(entry, named, file)
            _refuse_unended(name, file, tar.offset)
    except tarfile.TarError as error:
        raise ConfigError(f"data.urls: {name} is not a readable tar file ({error}); write or copy it again") from error


def key_and_extension(name: str) -> tuple[str, str] | None:
    """Return what webdataset makes of a name: the path up to the first dot of the file's name, and what follows it.

    None where there is no dot. A file's name that begins with one belongs to the folder, unless that has a dot too. In
    time in proportion to the name, which webdataset's regular expression does not take.
    """
    folder, slash, file = name.rpartition("/")
    stem, dot, extension = file.partition(".")
    if not dot or not (stem or (slash and "." not in folder.rpartition("/")[2])):
        return None
    return f"{folder}{slash}{stem}", extension


def _member(entry: tarfile.TarInfo, named: tuple[str, str], file: Forward) -> Member:
    key, extension = named
    end = entry.offset_data + entry.size

    def read(size: int) -> bytes:
        file.seek(max(entry.offset_data, file.position))
        return file.payload(min(size, end - file.position))

    return Member(key=key, extension=extension.lower(), start=entry.offset_data, size=entry.size, read=read)


def _refuse_unended(name: str, file: Forward, end: int) -> None:
    """Check that the tar ends where its members do: tarfile stops in silence where a header is cut short.

    Raises:
        ConfigError: there is no end mark, or something comes after it.
    """
    if file.position - end < tarfile.BLOCKSIZE:
        raise ConfigError(f"data.urls: {name} is cut short: it has no end mark. Copy or write it again")
    if any(file.payload(_LONGEST_PADDING)):
        raise ConfigError(
            f"data.urls: {name} goes on after its end mark at byte {end}, as when tars are joined by cat or the file is"
            " damaged: give the tars one by one, or write it again"
        )
