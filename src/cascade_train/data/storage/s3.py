"""Objects of S3 and of stores that speak its protocol, through boto3.

Credentials, region and endpoint come from where AWS tools look for them (AWS_PROFILE, AWS_ENDPOINT_URL, ...).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from cascade_train.data.storage.store import PassingError, PerProcess, Store, StoredObject, try_again
from cascade_train.errors import ConfigError, RunError, install_hint

SCHEME = "s3://"
_CONNECT_SECONDS, _READ_SECONDS = 10, 60
_PASSING_CODES = {"SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "Throttling", "ThrottlingException"}
T = TypeVar("T")


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
        head = _ask(lambda: client.head_object(Bucket=bucket, Key=key), "asking for", url)
        return StoredObject(url=url, size=head["ContentLength"], version=head["ETag"])

    def read(self, item: StoredObject, start: int, size: int) -> bytes:
        """See `Store.read`; a range is read again where a connection was cut."""
        if size == 0:
            return b""
        client = self._client()
        return _ask(lambda: _read_once(client, item, start, size), "reading", item.url)

    def list_prefix(self, url: str) -> list[StoredObject]:
        """Return every object whose key begins with the prefix of `s3://bucket/prefix`, sorted. Raises as `stat`."""
        bucket, prefix = _parse_url(url)
        pages = self._client().get_paginator("list_objects_v2")
        every = "Contents || `[]`"  # no key where there is no object
        found = _ask(lambda: list(pages.paginate(Bucket=bucket, Prefix=prefix).search(every)), "asking for", url)
        url_of = {f"{SCHEME}{bucket}/{entry['Key']}": entry for entry in found}
        return [StoredObject(url=key, size=url_of[key]["Size"], version=url_of[key]["ETag"]) for key in sorted(url_of)]


def _new_client(connections: int) -> Any:
    """Make a client that tries once: `try_again` repeats what may pass. Without credentials it signs nothing."""
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(f"data.urls names s3:// objects, which need boto3. {install_hint('s3')}.") from error
    try:
        session = boto3.session.Session()
        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            max_pool_connections=connections,
            retries={"total_max_attempts": 1},
            signature_version=UNSIGNED if session.get_credentials() is None else None,
        )
        return session.client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"data.urls: the AWS settings of this machine do not fit: {error}") from error


def _read_once(client: Any, item: StoredObject, start: int, size: int) -> bytes:
    bucket, key = _parse_url(item.url)
    stop = start + size - 1
    answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{stop}")
    with contextlib.closing(answer["Body"]) as body:
        if answer["ETag"] != item.version:
            raise RunError(
                f"{item.url} changed during the run: its ETag was {item.version} and is {answer['ETag']}; put the"
                " object back, or start another run with a new run.name"
            )
        status, given = answer["ResponseMetadata"]["HTTPStatusCode"], answer.get("ContentRange")
        if status != 206 or given != f"bytes {start}-{stop}/{item.size}":
            raise RunError(
                f"{item.url}: the server answered {status} with {given or 'no range'} where bytes {start}-{stop}/"
                f"{item.size} was asked for (206): it does not support ranged reads; use another server or gateway, or"
                " copy the data to a disk"
            )
        content = bytes(body.read())
    if len(content) != size:
        raise PassingError(f"{len(content)} of {size} bytes came")
    return content


def _ask(ask: Callable[[], T], verb: str, url: str) -> T:
    """Return an answer; ask again after failures that may pass. No message contains credentials."""
    from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError
    from botocore.exceptions import ConnectionError as NoConnectionError

    def attempt() -> T:
        try:
            return ask()
        except ClientError as error:
            raise _refusal(url, error.response) from error
        except (HTTPClientError, NoConnectionError, IncompleteReadError) as error:
            raise PassingError(f"{type(error).__name__}: {error}") from error

    return try_again(attempt, what=f"{verb} {url}")


def _refusal(url: str, answer: Mapping[str, Any]) -> Exception:
    code = str(answer.get("Error", {}).get("Code", "unknown"))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if status >= 500 or status == 429 or code in _PASSING_CODES:
        return PassingError(f"the server answered {status} {code}")
    if status == 404:
        return ConfigError(f"data.urls: {url} is not there ({code}); check bucket, key and AWS_ENDPOINT_URL")
    if status in (401, 403):
        return ConfigError(
            f"data.urls: {url} may not be read ({status} {code}); check the credentials that AWS tools use here"
            " (AWS_PROFILE, AWS_ACCESS_KEY_ID), their rights, and the region"
        )
    return RunError(f"{url}: the server answered {status} {code}")


def _parse_url(url: str) -> tuple[str, str]:
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,254}", bucket):
        raise ConfigError(f"data.urls={url} names no bucket: write s3://bucket/folder/000.tar or s3://bucket/folder/")
    return bucket, key
