"""The tars that `data.urls` names: paths, folders, `s3://bucket/key.tar`, `s3://bucket/prefix`, or `pipe:command`.

A prefix is listed once for a run: what was found is written down, and a resume reads it there.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from braceexpand import UnbalancedBracesError, braceexpand

from cascade_train.data.index.rows import first_names
from cascade_train.data.tar.members import PARTS
from cascade_train.data.tar.storage import S3, SCHEME, SCHEMES, LocalFiles, OtherStore, Store, StoredObject
from cascade_train.errors import ConfigError
from cascade_train.files.durable import write_durably
from cascade_train.files.run_folder import walk_data
from cascade_train.files.untrusted import open_regular, parsing, read_json
from cascade_train.redaction import LONGEST_REASON, redact, redact_argument, shortened

PIPE = "pipe:"
COMPRESSIONS = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".tbz2": "bz2", ".xz": "xz", ".txz": "xz"}
"""What Python's own library decompresses, by the end of a name."""

_ENDS = (".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")
_UNREAD_COMPRESSIONS = (".zst", ".tzst", ".lz4", ".br")
_ANY_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+):")
_WEB = "pipe:curl --fail --silent --show-error --location"
_LONGEST_LISTING = 512 * 1024**2  # of a million tars
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tar:
    """One tar."""

    item: StoredObject  # of a pipe, its url is `pipe:command` and its size 0
    store: Store | None  # reads it; None for a pipe
    caption: str = PARTS["caption"]  # extension of the files that hold the captions

    @property
    def parts(self) -> dict[str, str]:
        """Extensions of the files of a sample that are read beside its picture."""
        return {**PARTS, "caption": self.caption}

    @property
    def compression(self) -> str | None:
        """How the tar is compressed, by its name; None = not, or by a pipe's command."""
        return None if self.store is None else COMPRESSIONS.get(Path(self.item.name).suffix.lower())

    @property
    def is_remote(self) -> bool:
        """Whether it is no local file."""
        return not isinstance(self.store, LocalFiles)

    @property
    def is_indexable(self) -> bool:
        """Whether samples can be read at their offset."""
        return self.store is not None and self.compression is None

    @property
    def name(self) -> str:
        """The name in messages: a file's last part, of a pipe's command its program and its tars."""
        return redact_argument(self.item.url) if self.store is None else self.item.name

    @property
    def identity(self) -> str:
        """Its identity among tars: a file's name, or a pipe's command without secrets of known forms."""
        return redact(self.item.url) if self.store is None else self.item.name

    def read(self, start: int, size: int) -> bytes:
        """Read a range of a stored tar. See `Store.read`."""
        assert self.store is not None
        return self.store.read(self.item, start, size)

    def open(self) -> BinaryIO:
        """Open a stored tar as a file. See `Store.open`."""
        assert self.store is not None
        return self.store.open(self.item)


class Listings:
    """The tars below prefixes when the run began, kept in a file; without a path they are listed at every start."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, list[StoredObject]] = {}

    def below(self, prefix: str, store: S3) -> list[StoredObject]:
        """Tars below a prefix as they were when the run began, as they are now where that is unknown."""
        listed = [item for item in store.list_prefix(prefix) if item.url.lower().endswith(_ENDS)]
        if not listed:
            raise ConfigError(f"data.urls={prefix} holds no tar; check bucket and prefix, and that names end in .tar")
        outside = [item for item in listed if not item.url.startswith(f"{prefix.rstrip('/')}/")]
        if 0 < len(outside) < len(listed):
            text = "data.urls=%s also takes %d tars outside of the folder, such as %s: write %s/ for the folder alone"
            _log.warning(text, prefix, len(outside), outside[0].url, prefix)
        known, now = self._read().get(prefix, listed), set(listed)
        self._found[prefix] = known
        if lost := [item.name for item in known if item not in now]:
            text = f"{len(lost)} of the {len(known)} tars that the run began with are gone or changed"
            remedy = f"put them back, or remove {self._path} to take the prefix as it is now"
            raise ConfigError(f"data.urls={prefix}: {text} ({', '.join(lost[:5])}); {remedy}")
        if len(now) > len(known):
            text = "%s holds %d more tars than when the run began; they are not used. A new run uses them."
            _log.warning(text, prefix, len(now) - len(known))
        return known

    def write(self) -> None:
        """Write what was listed, beside what other sources of the run wrote; called once a run is claimed."""
        if self._path is None or not self._found:
            return
        lists = {**self._read(), **self._found}
        content = {prefix: [asdict(item) for item in items] for prefix, items in lists.items()}
        write_durably(self._path, json.dumps(content, indent=1) + "\n")

    def _read(self) -> Mapping[str, list[StoredObject]]:
        if self._path is None or not self._path.is_file():
            return {}
        with parsing(f"data.listing={self._path}", "is damaged", "remove it, and the prefixes are listed again"):
            with open_regular(self._path, limit=_LONGEST_LISTING) as file:
                content: dict[str, list[dict[str, Any]]] = read_json(file.read())
            return {prefix: [StoredObject(**item) for item in items] for prefix, items in content.items()}


def expand_urls(urls: str | list[str]) -> list[str]:
    """Expand folders, braces, `file:` and `~` to one url for each tar or prefix; folders sorted by path."""
    patterns = [urls] if isinstance(urls, str) else urls
    expanded = [_normalize(url) for pattern in patterns for url in _expand_braces(pattern)]
    return [url for entry in expanded for url in (_tars_below(Path(entry)) if Path(entry).is_dir() else [entry])]


def _tars_below(folder: Path) -> list[str]:
    files = [place / name for place, names in walk_data(folder) for name in names if name.lower().endswith(_ENDS)]
    if not files:
        raise ConfigError(f"data.urls={folder} holds no tar ({', '.join(_ENDS[:4])}), nor do the folders below it")
    return sorted(map(str, files))


def check_urls(urls: str | list[str]) -> list[str]:
    """Expand urls, and raise a `ConfigError` where a local tar is missing; stores are not asked."""
    entries = expand_urls(urls)
    paths = [Path(entry) for entry in entries if not entry.startswith(PIPE) and _store_of(entry) is None]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        patterns = shortened(",".join(map(redact_argument, [urls] if isinstance(urls, str) else urls)), LONGEST_REASON)
        remedy = f"Paths are relative to the current folder, {Path.cwd()}"
        if any("*" in path.name for path in missing):
            remedy = "Name them by braces, as in shard-{000..005}.tar, or as a list"
        text = f"{len(missing)} of {len(paths)} tar files not found: {first_names(map(str, missing), 3)}"
        raise ConfigError(f"data.urls={patterns}: {text}. {remedy}")
    return entries


def find_tars(urls: str | list[str], listings: Listings) -> list[Tar]:
    """Tars that `data.urls` names, in its order. Raises as `Store.stat`, and for unknown compressions."""
    entries, local, s3 = check_urls(urls), LocalFiles(), S3()
    stores: dict[str | None, Store] = {"s3": s3, **{scheme: OtherStore(scheme) for scheme in SCHEMES}}
    remote = [entry for entry in entries if _store_of(entry) is not None and not _is_prefix(entry)]
    for scheme in set(map(_store_of, remote)):
        stores[scheme].prepare()
    with ThreadPoolExecutor(s3.parallel_reads) as pool:
        heads = dict(zip(remote, pool.map(lambda entry: stores[_store_of(entry)].stat(entry), remote), strict=True))
    tars: list[Tar] = []
    for entry in entries:
        if entry.startswith(PIPE):
            tars.append(Tar(item=StoredObject(url=entry, size=0, version=""), store=None))
        elif _is_prefix(entry):
            tars += [Tar(item=item, store=s3) for item in listings.below(entry, s3)]
        elif entry.lower().endswith(_UNREAD_COMPRESSIONS):
            remedy = f"stream it, as in 'pipe:zstd -dc {Path(entry).name}', or decompress it"
            raise ConfigError(f"data.urls: {entry} is compressed in a way that is not read here; {remedy}")
        elif entry in heads:
            tars.append(Tar(item=heads[entry], store=stores[_store_of(entry)]))
        else:
            tars.append(Tar(item=local.stat(entry), store=local))
    return tars


def _store_of(url: str) -> str | None:
    scheme = url.partition("://")[0]
    return scheme if scheme in ("s3", *SCHEMES) and scheme != url else None


def _is_prefix(url: str) -> bool:
    return url.startswith(SCHEME) and not url.lower().endswith((*_ENDS, *_UNREAD_COMPRESSIONS))


def _expand_braces(pattern: str) -> list[str]:
    try:
        expanded = list(braceexpand(pattern))
    except (UnbalancedBracesError, ValueError) as error:
        text = f"data.urls={redact_argument(pattern)} has unbalanced braces: write {{000..005}} or {{a,b}}"
        raise ConfigError(text) from error
    is_kept = len(expanded) == 1 and (pattern.startswith(PIPE) or "{" not in pattern)
    return [pattern] if is_kept else expanded  # of a command backslashes stay


def _normalize(url: str) -> str:
    scheme = _ANY_SCHEME.match(url)
    if scheme is None:
        return str(Path(url).expanduser())
    if url.startswith(PIPE) or _store_of(url) is not None:
        if not url.removeprefix(PIPE).strip():
            raise ConfigError("data.urls=pipe: has no command: write pipe:cat train.tar")
        return url
    if scheme[1] == "file":
        return str(Path(re.sub("^file:(//)?", "", url)))
    remedy = f"stream it by '{_WEB} {url}'" if scheme[1] in ("http", "https") else "copy the tars to a disk or to S3"
    known = f"paths, file:, s3://, {'://, '.join(SCHEMES)}:// and pipe: are"
    raise ConfigError(f"data.urls={url} has a scheme that is not read, {scheme[1]}: ({known}); {remedy}")
