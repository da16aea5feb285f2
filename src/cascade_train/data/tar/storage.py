"""Where bytes come from: objects that are read by range, local files, those of S3 and of what fsspec reads.

Credentials, region and endpoint of S3 come from where AWS tools look for them (AWS_PROFILE, AWS_ENDPOINT_URL, ...).
"""

from __future__ import annotations

import abc
import contextlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from cascade_train.errors import ConfigError, RunError, install_hint

SCHEME = "s3://"
SCHEMES = ("gs", "gcs", "az", "abfs", "hf")
"""Of stores that fsspec reads: gs needs the package gcsfs, az adlfs; hf, of Hugging Face, is there."""

ATTEMPTS = 8
_CONNECT_SECONDS, _READ_SECONDS = 10, 60
_MAX_OPEN_FILES = 64
_CHUNK_BYTES = 8 * 1024**2
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """One object as it was when it was found."""

    url: str  # for a local file its path
    size: int  # bytes
    version: str  # changes when the content does: an ETag, or a file's time of change

    @property
    def name(self) -> str:
        """The last part of the url."""
        return self.url.rpartition("/")[2]


class Store(abc.ABC):
    """Objects that are read by range. A process that gets a copy, by fork or pickle, may read on."""

    parallel_reads: int = 1  # how many at a time are worth it

    @abc.abstractmethod
    def stat(self, url: str) -> StoredObject:
        """Size and version; a ConfigError where it is missing or forbidden, a RunError where the store fails."""

    @abc.abstractmethod
    def read(self, item: StoredObject, start: int, size: int) -> bytes:
        """Read exactly `size` bytes from `start`.

        An OSError where a local file cannot be read or ended early, a RunError where the object changed, or the store
        did not answer as it must, also after trying again.
        """

    def open(self, item: StoredObject) -> BinaryIO:
        """The object as a file, for reading from its beginning to its end with skips."""
        return io.BufferedReader(_ObjectFile(self, item), buffer_size=_CHUNK_BYTES)

    def prepare(self) -> None:
        """Make what this process needs for reading, before several threads read."""


class PerProcess(Generic[T]):
    """What each process makes for itself at its first use, since it must cross neither a fork nor a pickle."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[int, T] | None = None

    def __call__(self) -> T:
        """This process's own."""
        if self._made is None or self._made[0] != os.getpid():
            self._made = (os.getpid(), self._make())
        return self._made[1]

    def __getstate__(self) -> dict[str, object]:
        return {"_make": self._make, "_made": None}


class LocalFiles(Store):
    """Files of this machine, or of a shared file system; descriptors of those read last stay open."""

    def __init__(self) -> None:
        self._descriptors = PerProcess[dict[str, int]](dict)

    def stat(self, url: str) -> StoredObject:
        """See `Store.stat`."""
        status = Path(url).stat()
        return StoredObject(url=url, size=status.st_size, version=str(status.st_mtime_ns))

    def read(self, item: StoredObject, start: int, size: int) -> bytes:
        """See `Store.read`; safe for threads."""
        content = b""
        while len(content) < size:  # the system reads at most 2 GiB at once
            end = start + len(content)
            more = os.pread(self.descriptor(item.url), size - len(content), end)
            if not more:
                raise OSError(f"{item.url} ended at {end} of {start + size} bytes: it changed during the run")
            content += more
        return content

    def open(self, item: StoredObject) -> BinaryIO:
        """See `Store.open`."""
        return Path(item.url).open("rb")

    def descriptor(self, path: str) -> int:
        """This process's descriptor of a file, opened for reading."""
        opened = self._descriptors()
        if path not in opened:
            if len(opened) >= _MAX_OPEN_FILES:
                os.close(opened.pop(next(iter(opened))))
            opened[path] = os.open(path, os.O_RDONLY)
        return opened[path]


class ReadAhead(Generic[T]):
    """Prefetch for high-latency stores: several reads at a time, begun before they are needed."""

    def __init__(self, threads: int) -> None:
        self._pool = PerProcess(partial(ThreadPoolExecutor, threads))
        self._begun = PerProcess[dict[int, Future[T]]](dict)

    def begin(self, rows: Iterable[int], read: Callable[[int], T]) -> None:
        """Begin to read these rows; those begun before and not taken are dropped."""
        pool, begun = self._pool(), self._begun()
        while begun:
            begun.popitem()[1].cancel()
        begun.update({row: pool.submit(read, row) for row in rows})

    def take(self, row: int, read: Callable[[int], T]) -> T:
        """What reading a row gives or raises; waits where it was begun."""
        begun = self._begun().pop(row, None)
        return read(row) if begun is None else begun.result()


class _ObjectFile(io.RawIOBase):
    """An object as a file. What is skipped by `seek` is not read from the store."""

    def __init__(self, store: Store, item: StoredObject) -> None:
        self._store, self._item, self._position = store, item, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._item.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] # the interpreter passes a memoryview
        size = max(0, min(len(buffer), self._item.size - self._position))
        buffer[:size] = self._store.read(self._item, self._position, size)
        self._position += size
        return size


class S3(Store):
    """Ranged reads whose length and ETag are checked.

    Each process makes a client of its own: one that crosses a fork answers with the bytes of another's request.
    """

    parallel_reads = 16

    def __init__(self) -> None:
        self._client = PerProcess(partial(_new_client, self.parallel_reads))

    def prepare(self) -> None:
        """See `Store.prepare`: making a client is not safe for threads, using one is."""
        self._client()

    def stat(self, url: str) -> StoredObject:
        """See `Store.stat`: ask for size and ETag."""
        (bucket, key), client = _parse_url(url), self._client()
        with _asking("asking for", url):
            head = client.head_object(Bucket=bucket, Key=key)
        return StoredObject(url=url, size=head["ContentLength"], version=head["ETag"])

    def read(self, item: StoredObject, start: int, size: int) -> bytes:
        """See `Store.read`; a range is asked for again where its answer was cut."""
        if size == 0:
            return b""
        with _asking("reading", item.url):
            for _ in range(ATTEMPTS):
                if (content := _read_once(self._client(), item, start, size)) is not None:
                    return content
        raise RunError(f"reading {item.url} failed {ATTEMPTS} times: the connection was cut before {size} bytes came")

    def list_prefix(self, url: str) -> list[StoredObject]:
        """Every object whose key begins with the prefix of `s3://bucket/prefix`, sorted. Raises as `stat`."""
        bucket, prefix = _parse_url(url)
        pages = self._client().get_paginator("list_objects_v2")
        every = "Contents || `[]`"  # no key where there is no object
        with _asking("asking for", url):
            entries = list(pages.paginate(Bucket=bucket, Prefix=prefix).search(every))
        url_of = {f"{SCHEME}{bucket}/{entry['Key']}": entry for entry in entries}
        return [StoredObject(url=key, size=url_of[key]["Size"], version=url_of[key]["ETag"]) for key in sorted(url_of)]


class OtherStore(Store):
    """Objects of one of `SCHEMES` through fsspec, whose clients try again by themselves; each process makes its own."""

    parallel_reads = 16

    def __init__(self, scheme: str) -> None:
        self._client = PerProcess(partial(_new_file_system, scheme))

    def prepare(self) -> None:
        """See `Store.prepare`."""
        self._client()

    def stat(self, url: str) -> StoredObject:
        """See `Store.stat`."""
        client = self._client()
        with _reading(url):
            return StoredObject(url=url, size=int(client.info(url)["size"]), version=client.ukey(url))

    def read(self, item: StoredObject, start: int, size: int) -> bytes:
        """See `Store.read`; of an object that changes, its size alone is noticed."""
        with _reading(item.url):
            content: bytes = self._client().cat_file(item.url, start=start, end=start + size)
        if len(content) != size:
            raise RunError(f"{item.url} ended at {start + len(content)} of {start + size} bytes: it changed")
        return content


def _new_file_system(scheme: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(scheme, skip_instance_cache=True)
    except (ImportError, ValueError) as error:  # it names the package to install
        raise ConfigError(f"data.urls names {scheme}:// objects: {error}") from error


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        raise ConfigError(f"data.urls: {url} is not there, or may not be read; check name and credentials") from error
    except Exception as error:  # each store has errors of its own
        raise RunError(f"{url} cannot be read: {type(error).__name__}: {error}") from error


def _new_client(connections: int) -> Any:
    """Make a client that tries again what may pass. Without credentials it signs nothing."""
    try:
        import boto3
        from botocore import UNSIGNED, config, exceptions
    except ImportError as error:
        raise ConfigError(f"data.urls names s3:// objects, which need boto3. {install_hint('s3')}.") from error
    try:
        session = boto3.session.Session()
        options = config.Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            max_pool_connections=connections,
            retries={"mode": "adaptive", "total_max_attempts": ATTEMPTS},
            signature_version=UNSIGNED if session.get_credentials() is None else None,
        )
        return session.client("s3", config=options)
    except (exceptions.BotoCoreError, ValueError) as error:
        raise ConfigError(f"data.urls: the AWS settings of this machine do not fit: {error}") from error


def _read_once(client: Any, item: StoredObject, start: int, size: int) -> bytes | None:
    """Read a range; None where the answer began and was cut, which the client does not try again."""
    from botocore import exceptions

    bucket, key = _parse_url(item.url)
    stop = start + size - 1
    answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{stop}")
    with contextlib.closing(answer["Body"]) as body:
        if answer["ETag"] != item.version:
            tags = f"its ETag was {item.version} and is {answer['ETag']}"
            raise RunError(f"{item.url} changed during the run: {tags}; put the object back, or start another run")
        status, sent = answer["ResponseMetadata"]["HTTPStatusCode"], answer.get("ContentRange")
        if status != 206 or sent != f"bytes {start}-{stop}/{item.size}":
            text = f"the server answered {status} with {sent or 'no range'} where bytes {start}-{stop}/{item.size} was"
            raise RunError(f"{item.url}: {text} asked for: it does not support ranged reads; copy the data to a disk")
        try:
            content = bytes(body.read())
        except (exceptions.HTTPClientError, exceptions.IncompleteReadError, ConnectionError):
            return None
    return content if len(content) == size else None


@contextlib.contextmanager
def _asking(verb: str, url: str) -> Iterator[None]:
    """Raise a ConfigError or a RunError where a store refuses or does not answer. No message contains credentials."""
    from botocore import exceptions

    try:
        yield
    except exceptions.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "unknown"))
        metadata = error.response.get("ResponseMetadata", {})
        status = int(metadata.get("HTTPStatusCode", 0))
        if status == 404:
            remedy = "check bucket, key and AWS_ENDPOINT_URL"
            raise ConfigError(f"data.urls: {url} is not there ({code}); {remedy}") from error
        if status in (401, 403):
            remedy = "check the credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID), their rights, and the region"
            raise ConfigError(f"data.urls: {url} may not be read ({status} {code}); {remedy}") from error
        times = metadata.get("RetryAttempts", 0) + 1
        raise RunError(f"{verb} {url} failed {times} times: the server answered {status} {code}") from error
    except (exceptions.HTTPClientError, exceptions.ConnectionError) as error:
        raise RunError(f"{verb} {url} failed {ATTEMPTS} times: {type(error).__name__}: {error}") from error


def _parse_url(url: str) -> tuple[str, str]:
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,254}", bucket):
        raise ConfigError(f"data.urls={url} names no bucket: write s3://bucket/folder/000.tar or s3://bucket/folder/")
    return bucket, key
