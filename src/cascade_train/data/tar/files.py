"""The tars behind the urls: where each lies, its size and version, and how it can be read.

A prefix of S3 is listed here, once for a run: what was found is written down, and a resume reads it there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cascade_train.data.storage.s3 import S3
from cascade_train.data.storage.store import LocalFiles, Store, StoredObject
from cascade_train.data.storage.urls import PIPE, expand_urls, refuse_missing
from cascade_train.data.storage.urls import S3 as S3_SCHEME
from cascade_train.data.tar.sample import PARTS
from cascade_train.errors import ConfigError
from cascade_train.files.durable import write_durably
from cascade_train.redaction import redact, redact_argument

COMPRESSIONS = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".tbz2": "bz2", ".xz": "xz", ".txz": "xz"}
"""What Python's own library decompresses, by the end of a name."""

_ENDS = (".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")
_UNREAD_COMPRESSIONS = (".zst", ".tzst", ".lz4", ".br")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tar:
    """One tar.

    Attributes:
        item: where it lies; a pipe's url is `pipe:command`, its size 0.
        store: what reads it; None for a pipe.
        caption: extension of the files that hold the captions.
    """

    item: StoredObject
    store: Store | None
    caption: str = PARTS["caption"]

    @property
    def parts(self) -> dict[str, str]:
        """What is read of a sample beside its picture, by its extension."""
        return {**PARTS, "caption": self.caption}

    @property
    def compression(self) -> str | None:
        """How the tar is compressed, by its name; None = it is not, or by a pipe's command."""
        return None if self.store is None else COMPRESSIONS.get(Path(self.item.name).suffix.lower())

    @property
    def is_remote(self) -> bool:
        """Whether it is no local file."""
        return not isinstance(self.store, LocalFiles)

    @property
    def has_places(self) -> bool:
        """Whether samples can be read at their place, so that the tar can be indexed."""
        return self.store is not None and self.compression is None

    @property
    def name(self) -> str:
        """The name in messages: a file's last part, of a pipe's command its program and its tars."""
        return redact_argument(self.item.url) if self.store is None else self.item.name

    @property
    def identity(self) -> str:
        """What tells it from other tars: a file's last part, a pipe's command without the secrets of known forms."""
        return redact(self.item.url) if self.store is None else self.item.name

    def read(self, start: int, size: int) -> bytes:
        """Read a range. See `Store.read`."""
        return self._placed().read(self.item, start, size)

    def open(self) -> BinaryIO:
        """Open the stored bytes as a file. See `Store.open`."""
        return self._placed().open(self.item)

    def _placed(self) -> Store:
        assert self.store is not None, f"{self.name} is a pipe: it has no places"
        return self.store


class Listings:
    """What prefixes held when the run began: read from a file where it is there, written once a run is claimed.

    Attributes:
        path: of the file; None = none is kept, and prefixes are listed at every start.
    """

    def __init__(self, path: Path | None) -> None:
        """Store; nothing is read yet."""
        self.path = path
        self._found: dict[str, list[StoredObject]] = {}

    def below(self, prefix: str, store: S3) -> list[StoredObject]:
        """Return the tars below a prefix as they were when the run began; list them where that is not known.

        Raises:
            ConfigError: there is none, or one that the run began with is gone or changed.
        """
        listed = [item for item in store.list_prefix(prefix) if item.url.lower().endswith(_ENDS)]
        if not listed:
            raise ConfigError(f"data.urls={prefix} holds no tar; check bucket and prefix, and that names end in .tar")
        _log_outside(prefix, listed)
        known = self._read().get(prefix)
        self._found[prefix] = listed if known is None else known
        if known is not None:
            self._compare(prefix, known, listed)
        return self._found[prefix]

    def write(self) -> None:
        """Write down what was listed, beside what other sources of the run wrote. Nothing listed, nothing written."""
        if self.path is None or not self._found:
            return
        lists = {**self._read(), **self._found}
        content = {prefix: [asdict(item) for item in items] for prefix, items in lists.items()}
        write_durably(self.path, json.dumps(content, indent=1) + "\n")

    def _read(self) -> Mapping[str, list[StoredObject]]:
        if self.path is None or not self.path.is_file():
            return {}
        try:
            content: dict[str, list[dict[str, Any]]] = json.loads(self.path.read_text())
            return {prefix: [StoredObject(**item) for item in items] for prefix, items in content.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"data.listing={self.path} is damaged ({error}); remove it, and the prefixes are listed again"
            ) from error

    def _compare(self, prefix: str, known: list[StoredObject], listed: list[StoredObject]) -> None:
        now = set(listed)
        lost = [item.name for item in known if item not in now]
        if lost:
            raise ConfigError(
                f"data.urls={prefix}: {len(lost)} of the {len(known)} tars that the run began with are gone or changed"
                f" ({', '.join(lost[:5])}); put them back, or remove {self.path} to take the prefix as it is now"
            )
        if len(now) > len(known):
            _log.warning(
                "%s holds %d more tars than when the run began; they are not used. A new run uses them.",
                prefix,
                len(now) - len(known),
            )


def _log_outside(prefix: str, listed: list[StoredObject]) -> None:
    """Warn where a prefix without a slash at the end takes more than the folder of that name."""
    inside = [item for item in listed if item.url.startswith(f"{prefix.rstrip('/')}/")]
    outside = [item for item in listed if item not in inside]
    if inside and outside:
        _log.warning(
            "data.urls=%s also takes %d tars outside of the folder, such as %s: write %s/ for the folder alone",
            prefix,
            len(outside),
            outside[0].url,
            prefix,
        )


def is_prefix(url: str) -> bool:
    """Return whether a url is an S3 prefix, which is listed: whatever does not end as a tar does."""
    return url.startswith(S3_SCHEME) and not url.lower().endswith((*_ENDS, *_UNREAD_COMPRESSIONS))


def find_tars(urls: str | list[str], listings: Listings) -> list[Tar]:
    """Return the tars that `data.urls` names, in its order.

    Raises:
        ConfigError: one is missing, may not be read, or is compressed in a way that is not read.
        RunError: a store cannot be reached.
    """
    entries = expand_urls(urls)
    local, s3 = LocalFiles(), S3()
    refuse_missing(urls, [Path(entry) for entry in entries if not entry.startswith((PIPE, S3_SCHEME))])
    remote = [entry for entry in entries if entry.startswith(S3_SCHEME) and not is_prefix(entry)]
    heads = dict(zip(remote, at_once(s3, s3.stat, remote), strict=True))
    tars: list[Tar] = []
    for entry in entries:
        if entry.startswith(PIPE):
            tars.append(Tar(item=StoredObject(url=entry, size=0, version=""), store=None))
        elif entry in heads:
            tars.append(Tar(item=heads[entry], store=s3))
        elif is_prefix(entry):
            tars += [Tar(item=item, store=s3) for item in listings.below(entry, s3)]
        else:
            tars.append(Tar(item=local.stat(entry), store=local))
    _refuse_unknown_compression(tars)
    return tars


def at_once(store: Store, work: Callable[[str], StoredObject], urls: list[str]) -> list[StoredObject]:
    """Return the results of `work`, several at a time where the store is far, in the order of the urls."""
    if not urls:
        return []
    store.prepare()
    with ThreadPoolExecutor(store.parallel_reads) as pool:
        return list(pool.map(work, urls))


def _refuse_unknown_compression(tars: list[Tar]) -> None:
    for tar in tars:
        if tar.store is not None and tar.item.name.lower().endswith(_UNREAD_COMPRESSIONS):
            raise ConfigError(
                f"data.urls: {tar.item.url} is compressed in a way that is not read here; stream it, as in"
                f" 'pipe:zstd -dc {tar.item.name}', or decompress it"
            )
