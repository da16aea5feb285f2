"""The samples of one tar read from its beginning to its end, whatever gives its bytes.

Only bytes of usable samples are kept, one sample at a time. Nothing is unpacked to a disk.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from cascade_train.data.storage.urls import PIPE
from cascade_train.data.tar.files import Tar
from cascade_train.data.tar.members import Forward, Member, samples
from cascade_train.data.tar.pipe import piped
from cascade_train.data.tar.sample import IMAGE_EXTENSIONS, Dropped, image_extension
from cascade_train.errors import ConfigError, RunError

_DECOMPRESSORS: Mapping[str, Callable[..., Any]] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}


def stream_samples(
    tar: Tar, *, max_file_bytes: int, timeout_seconds: float | None, dropped: Dropped
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield key and parts ("image", "caption", "json", "mask") of each sample that has a picture and a caption.

    Args:
        tar: any, also a pipe or a compressed one.
        max_file_bytes: of the largest file of a sample: what a few compressed bytes claim to be may not fit here.
        timeout_seconds: how long a pipe may give nothing; None = for ever.
        dropped: counts what is no usable sample.

    Raises:
        ConfigError: the tar is damaged or cut short, or a key's files are not neighbours.
        RunError: a command fails, a store cannot be read, a compressed tar is damaged, or a file is too large.
    """
    wanted = {*IMAGE_EXTENSIONS, *tar.parts.values()}

    def take(member: Member) -> bytes | None:
        if member.extension not in wanted:
            return None
        if member.size > max_file_bytes:
            raise RunError(
                f"data.urls: {tar.name}: {member.key}.{member.extension} has {member.size} bytes, more than"
                f" data.stream.max_file_mib={max_file_bytes >> 20}: remove it, or raise the limit"
            )
        content = member.read(member.size)
        if len(content) < member.size:
            raise ConfigError(f"data.urls: {tar.name} ends within {member.key}.{member.extension}: copy it again")
        return content

    with _opened(tar, timeout_seconds) as file:
        for key, files in samples(tar.name, Forward(file, seekable=tar.has_places), take):
            image = image_extension(files)
            if image is None or tar.caption not in files:
                dropped.count(key, files, no_image=image is None)
                continue
            found = {"image": files[image], **{part: files.get(name) for part, name in tar.parts.items()}}
            yield key, {part: content for part, content in found.items() if content is not None}


@contextmanager
def _opened(tar: Tar, timeout_seconds: float | None) -> Iterator[Any]:
    """Open what gives the tar's bytes, and tell its failures by the tar's name."""
    if tar.store is None:
        with piped(tar.item.url.removeprefix(PIPE), timeout_seconds=timeout_seconds) as file:
            yield file
        return
    try:
        with tar.open() as stored:
            yield stored if tar.compression is None else _Decompressed(tar, stored)
    except OSError as error:
        raise _damaged(tar, error) from error


class _Decompressed:
    """What a compressed tar holds; its damage is told before tarfile gives it other names."""

    def __init__(self, tar: Tar, stored: IO[bytes]) -> None:
        assert tar.compression is not None, f"{tar.name} is not compressed"
        self._tar, self._file = tar, _DECOMPRESSORS[tar.compression](stored)

    def read(self, size: int) -> bytes:
        try:
            content: bytes = self._file.read(size)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise _damaged(self._tar, error) from error
        return content


def _damaged(tar: Tar, error: Exception) -> RunError:
    return RunError(f"data.urls: {tar.item.url} cannot be read to its end: {error}; copy it again")
