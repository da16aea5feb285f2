"""Tars of the webdataset layout: samples read forward from any file, the meaning of their files, and writing them."""

from __future__ import annotations

import tarfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from cascade_train.data.index.row_filter import read_metadata
from cascade_train.data.index.rows import LONGEST_KEY
from cascade_train.data.sample import RawSample, UnreadableSampleError, caption_text
from cascade_train.errors import ConfigError
from cascade_train.files.durable import replacing
from cascade_train.files.untrusted import parsing
from cascade_train.redaction import LONGEST_NAME, printable, shortened

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
PARTS = {"caption": "txt", "json": "json", "mask": "mask.png"}
"""What is read of a sample beside its picture, by its extension."""

_LONGEST_HEADER = 1024**2  # of names and pax records, which tarfile reads as a whole
_LONGEST_PADDING = 1024**2  # tar fills up to a multiple of its record, mostly 10 KiB
_SKIP_BYTES = 1024**2
_LARGEST = 2**50  # bytes of a member
T = TypeVar("T")


class Forward:
    """A file for tarfile that is read from its beginning to its end; skips seek where the file can."""

    def __init__(self, file: IO[bytes], *, seekable: bool) -> None:
        self.position = 0
        self._file, self._seekable = file, seekable

    def tell(self) -> int:
        """The position."""
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
        """Read what tarfile asks for: headers, which may claim any length."""
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


class Member(NamedTuple):
    """A regular file of a tar."""

    key: str
    extension: str  # lower case: "jpg"
    start: int  # its first byte in the tar
    size: int  # bytes
    file: Forward

    def read(self, size: int) -> bytes:
        """Up to as many of its next bytes, until the next member is asked for."""
        return self.read_at(max(0, self.file.position - self.start), size)

    def read_at(self, start: int, size: int) -> bytes:
        """Up to as many of its bytes from a position on, no earlier than what was read last."""
        self.file.seek(self.start + start)
        return self.file.payload(min(size, self.size - start))


@dataclass(kw_only=True)
class Dropped:
    """What a shard holds besides usable samples."""

    without_caption: int = 0  # keys with a picture
    without_image: int = 0  # keys
    examples: list[str] = field(default_factory=list)  # the first of these keys, with their extensions

    def text(self, caption: str) -> str:
        """Numbers and examples for messages; captions come from files of an extension."""
        return (
            f"{self.without_caption} keys with a picture but no caption (.{caption}), {self.without_image} keys"
            f" without a picture (.{', .'.join(IMAGE_EXTENSIONS)}); found: {'; '.join(self.examples) or 'none'}"
        )

    def count(self, key: str, extensions: Iterable[str], *, no_image: bool) -> None:
        """Count a key without a picture, or else without a caption."""
        self.without_image += no_image
        self.without_caption += not no_image
        if len(self.examples) < 5:
            self.examples.append(printable(shortened(f"{key} ({', '.join(sorted(extensions))})", LONGEST_NAME)))


def samples(
    name: str, file: Forward, take: Callable[[Member], T], extensions: Mapping[str, str], dropped: Dropped
) -> Iterator[tuple[str, dict[str, T]]]:
    """Yield key and parts of each sample: "image", and those of `extensions`, among them "caption" or "json".

    `take` makes the part of a file; it is called with each file once, while its bytes can be read. A ConfigError where
    the tar is damaged or cut short, or a key's files are not neighbours.
    """
    for key, files in _group_by_key(name, file, take):
        image = next((extension for extension in IMAGE_EXTENSIONS if extension in files), None)
        parts = {part: files[extension] for part, extension in extensions.items() if extension in files}
        if image is None or parts.keys().isdisjoint(("caption", "json")):
            dropped.count(key, files, no_image=image is None)
        else:
            yield key, {"image": files[image], **parts}


def _group_by_key(name: str, file: Forward, take: Callable[[Member], T]) -> Iterator[tuple[str, dict[str, T]]]:
    seen: set[str] = set()
    current, files = "", dict[str, T]()
    for member in _read_members(name, file):
        if member.key != current and files:
            yield current, files
            files = {}
        if (member.key != current and member.key in seen) or member.extension in files:
            key = printable(shortened(member.key, LONGEST_NAME))
            text = f"the files of key {key} are not next to each other, or one is there twice"
            raise ConfigError(f"data.urls: {name}: {text}; write the tar with tar --sort=name -cf a.tar folder/")
        seen.add(member.key)
        current, files[member.extension] = member.key, take(member)
    if files:
        yield current, files


def key_and_extension(name: str) -> tuple[str, str] | None:
    """Split a name as webdataset does: the path up to the first dot of the file's name, and what follows it.

    None without a dot. A name that begins with one belongs to the folder, unless that has a dot too. Accents of the key
    are composed. Linear in the name's length, unlike webdataset's regular expression.
    """
    folder, slash, file = name.rpartition("/")
    stem, dot, extension = file.partition(".")
    if not dot or not (stem or (slash and "." not in folder.rpartition("/")[2])):
        return None
    return unicodedata.normalize("NFC", f"{folder}{slash}{stem}"), extension


def _read_members(name: str, file: Forward) -> Iterator[Member]:
    with (
        parsing(f"data.urls: {name}", "is not a readable tar file", "write or copy it again", passing=OSError),
        tarfile.open(fileobj=file, mode="r:") as tar,  # type: ignore[call-overload] # it needs no more than this
    ):
        for entry in tar:
            tar.members = []  # tarfile keeps every header otherwise
            if len(entry.name) > LONGEST_KEY or not 0 <= entry.size < _LARGEST:
                text = f"a name of {len(entry.name)} characters, or a size of {entry.size} bytes"
                raise tarfile.ReadError(f"{text}, at byte {entry.offset}")
            if entry.name.rpartition("/")[2].startswith("._"):  # what macOS keeps of a file's attributes
                continue
            named = key_and_extension(entry.name)
            if named is not None and entry.isreg() and not entry.issparse():
                yield Member(named[0], named[1].lower(), entry.offset_data, entry.size, file)
        end = tar.offset
    if file.position - end < tarfile.BLOCKSIZE:  # tarfile stops in silence where a header is cut short
        raise ConfigError(f"data.urls: {name} is cut short: it has no end mark. Copy or write it again")
    if any(file.payload(_LONGEST_PADDING)):
        text = f"goes on after its end mark at byte {end}, as when tars are joined by cat or it is damaged"
        raise ConfigError(f"data.urls: {name} {text}: give the tars one by one, or write it again")


def raw_sample(parts: Mapping[str, bytes], key: str, *, needs_values: bool) -> RawSample:
    """Make the sample of its files: "image", and of "caption", "json" and "mask" those that are there."""
    values = read_metadata(parts["json"]) if needs_values and "json" in parts else {}
    if values is None:
        raise UnreadableSampleError("it has no readable json, which data.captions asks for")
    caption = caption_text(parts.get("caption", b""))
    return RawSample(
        image=parts["image"], caption=caption, caption_from=".txt", key=key, values=values, mask=parts.get("mask")
    )


def write_tar(path: Path, samples: Iterable[Mapping[str, Any]]) -> Path:
    """Write samples, `__key__` and parts by extension, as a tar in one step; equal samples give equal bytes."""
    from webdataset import TarWriter  # takes seconds to import

    with replacing(path, durable=False) as partial, TarWriter(str(partial), mtime=0) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return path
