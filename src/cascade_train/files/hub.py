"""Checked downloads: of the hub, by its own client, and of other addresses of the web."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub import DryRunFileInfo, constants
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from huggingface_hub.utils import _http, parse_ratelimit_headers, tqdm

from cascade_train.errors import ConfigError
from cascade_train.files.durable import replacing
from cascade_train.files.output import RECORD
from cascade_train.redaction import LONGEST_NAME, shortened

_SOURCE = re.compile(r"(?!.*\.\.)(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<inside>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r'(W/)?"?([0-9a-f]{40}|[0-9a-f]{64})"?')
_SECONDS, _SILENT_SECONDS = 5.0, 60.0
"""How long a hub may take to answer at all, before the first download, and another address to send anything."""

_LONGEST_WAIT = 600
"""Seconds for which the client waits where a hub limits requests."""

_BLOCK = 2**20
_ERROR_BLOCKS, _ERROR_BLOCK = 64, 1024
"""How much of the body of an error is read: the client reads it whole for its message."""

_LOG_IN = "log in (hf auth login, or HF_TOKEN in the environment)"
_REMEDIES = {
    "GatedRepoError": f"accept its terms at {{url}}, then {_LOG_IN}",
    "RepositoryNotFoundError": f"check the name; if it is private, {_LOG_IN}",
    "RevisionNotFoundError": "name another revision behind the @, such as @main, or none",
    "RemoteEntryNotFoundError": "check the name of the file, or name another revision behind an @",
    "FileMetadataError": "check proxies and HF_ENDPOINT, which has to name a hub or mirror, or give a local path",
}
"""What helps against errors of the client, by their classes."""

_REMEDY = "check the name, download it where there is a network (cascade-train download), or give a local path"
_ANSWERED = f"try again later, check proxies and HF_ENDPOINT, {_LOG_IN}, or give a local path"
_TOO_MANY = f"wait some minutes, or {_LOG_IN}, which raises the limit"


@dataclass(frozen=True)
class HubSource:
    """`owner/name[@revision][:inside]`: a repository, its commit, tag or branch, a folder or file."""

    repo: str
    revision: str | None
    inside: str

    @property
    def commit(self) -> str | None:
        """The named commit, or the cached one of the branch or tag; None = unknown.

        A ConfigError where the cache has another text in its place: the client cannot read it, or takes it for a path.
        """
        revision = self.revision or "main"
        if _COMMIT.fullmatch(revision):
            return revision
        ref = self._cache() / "refs" / revision
        named = ref.read_bytes().decode(errors="replace").strip() if ref.is_file() else ""
        if named and not _COMMIT.fullmatch(named):
            raise ConfigError(f"{ref} has {shortened(named, LONGEST_NAME)!r} where a commit belongs; delete that file")
        return named or None

    @property
    def asked(self) -> str:
        """The revision to request: the named one, else the cached commit of `main`."""
        return self.revision or self.commit or "main"

    def folder(self) -> Path | None:
        """Return the folder of that commit in the cache; None = there is none."""
        path = self._cache() / "snapshots" / (self.commit or "-")
        return path if path.is_dir() else None

    def look(self, name: str, *, cached_only: bool = False, cache_dir: str | None = None) -> DryRunFileInfo | None:
        """Return size and place of a file without fetching it; None = the repository has none of that name.

        A LocalEntryNotFoundError where it is not in the cache and the hub cannot be asked, or another of the client.
        """
        _prepare_client()
        cached = huggingface_hub.try_to_load_from_cache(self.repo, name, revision=self.asked, cache_dir=cache_dir)
        if cached is huggingface_hub._CACHED_NO_EXIST:
            return None
        if cached is None and not cached_only:
            _reach(constants.ENDPOINT)
        try:
            return huggingface_hub.hf_hub_download(
                self.repo, name, revision=self.asked, cache_dir=cache_dir, local_files_only=cached_only, dry_run=True
            )
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return None

    def fetch(self, name: str, *, verify: bool = False) -> Path:
        """Return the path of a file in the cache, downloaded and checked against its hash if it is not there.

        `verify`: a file that is there is checked too, and replaced by a new download where it is damaged. A ConfigError
        where the hub sent other or more content than it announced, which is not kept, or where the user has to delete
        what the cache has in its place; else an error of the client.
        """
        there = (self.folder() or self._cache()) / name
        is_here = there.is_file()
        is_new, path = False, there
        if not (is_here and _COMMIT.fullmatch(self.asked)):
            is_new, path = self._download(name)
        if not path.is_file():
            raise ConfigError(f"{path} lies where {self.repo}:{name} belongs, and is no file; delete it")
        if is_here and path == there and not verify:
            return path
        if (fault := find_fault(path)) and is_new:
            content = path.parent / path.readlink() if path.is_symlink() else path
            for each in (path, content):
                each.unlink(missing_ok=True)
            raise _mismatch(f"{self.repo}:{name}", fault)
        if fault:
            self._replace(path, name)
        return path

    def _download(self, name: str, cache_dir: str | None = None) -> tuple[bool, Path]:
        """Return whether the content came now, and the path that it has in the cache."""
        info = self.look(name, cache_dir=cache_dir)
        bar = _bounded_bar(f"{self.repo}:{name}", None if info is None else info.file_size)
        given: dict[str, Any] = {"revision": self.asked, "cache_dir": cache_dir, "tqdm_class": bar}
        path = huggingface_hub.hf_hub_download(self.repo, name, **given)
        return info is None or not info.is_cached, Path(path)

    def _replace(self, damaged: Path, name: str) -> None:
        """Replace a damaged file by a download beside the cache, if that is the same file."""
        with TemporaryDirectory(dir=self._cache().parent) as beside:
            _, path = self._download(name, beside)
            if fault := find_fault(path):
                raise _mismatch(f"{self.repo}:{name}", fault)
            if announced_hash(path) != announced_hash(damaged):
                raise ConfigError(
                    f"{damaged.resolve()} is damaged, and the hub has another {self.repo}:{name} now; delete that file "
                    "and download again to take the hub's"
                )
            (path.parent / path.readlink()).replace(damaged.parent / damaged.readlink())

    def _cache(self) -> Path:
        return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{self.repo.replace('/', '--')}"


@dataclass(frozen=True)
class WebFile:
    """A file of the web by address and SHA-256, 64 hex digits, kept in torch.hub's folder."""

    url: str
    sha256: str

    @property
    def path(self) -> Path:
        """Where it lies, or would: torch.hub's folder, which TORCH_HOME or XDG_CACHE_HOME moves."""
        caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        home = Path(os.environ.get("TORCH_HOME", f"{caches}/torch")).expanduser()
        return home.absolute() / "hub" / "checkpoints" / self.url.rpartition("/")[2]

    def size(self) -> int:
        """Return its bytes, else those that its address announces, 0 = none; an OSError if it fails."""
        if self.path.is_file():
            return self.path.stat().st_size
        with urllib.request.urlopen(self.url, timeout=_SILENT_SECONDS) as answer:
            return int(answer.headers.get("Content-Length") or 0)

    def fetch(self) -> Path:
        """Return its path, checked against its hash; downloaded if it is not there, or damaged.

        A ConfigError where the content is another one, which is not kept; an OSError where it cannot be had.
        """
        if self.path.is_file() and find_fault(self.path, self.sha256) is None:
            return self.path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as beside:
            with urllib.request.urlopen(self.url, timeout=_SILENT_SECONDS) as answer, beside.open("wb") as file:
                for left in range(int(answer.headers.get("Content-Length") or 0), 0, -_BLOCK):
                    file.write(answer.read(min(_BLOCK, left)))
            if fault := find_fault(beside, self.sha256):
                raise _mismatch(self.url, fault)
        return self.path


def _mismatch(where: str, fault: str) -> ConfigError:
    return ConfigError(
        f"{where}: checksum mismatch of the download ({fault}), which was removed; download it again, and if that does "
        "not help, look for a proxy or mirror (HF_ENDPOINT) that changes files"
    )


def parse_source(source: str) -> HubSource | None:
    """Return what a text names on the hub; None = it has not that form."""
    match = _SOURCE.fullmatch(source)
    return match and HubSource(match["repo"], match["revision"], match["inside"] or "")


def announced_hash(path: Path) -> str | None:
    """Return the hub's hash of a cached file: SHA-256 of large ones, git's SHA-1 of small ones."""
    name = path.readlink().name if path.is_symlink() else ""
    return name if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) else None


def find_fault(path: Path, expected: str | None = None) -> str | None:
    """Compare a file with a hash, else with the hub's; None = equal, else the difference."""
    expected = expected or announced_hash(path)
    if expected is None:
        return None
    digest = hashlib.sha256() if len(expected) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: digest).hexdigest()
    return None if found == expected else f"its hash is {found[:12]}…, not {expected[:12]}…"


def _prepare_client() -> None:
    """Check the client's answers, and remove its log handler, which shows secrets."""
    logging.getLogger("huggingface_hub").handlers.clear()
    _check_answers()


@cache
def _check_answers() -> None:
    factory = _http._GLOBAL_CLIENT_FACTORY  # the user's, if there is one

    def client() -> Any:
        made = factory()
        made.event_hooks["response"].append(_check_answer)
        return made

    huggingface_hub.set_client_factory(client)


def _check_answer(answer: Any) -> None:
    """Bound what the client reads of an error and how long it waits; refuse a commit or an ETag that is no hash.

    The client names folders and files by these two.
    """
    headers = answer.headers
    if answer.request.method != "HEAD" and not answer.is_success:
        answer._content = b"".join(islice(answer.iter_bytes(_ERROR_BLOCK), _ERROR_BLOCKS))
        answer.close()
    if answer.url.host != "huggingface.co":
        headers.pop("X-Xet-Hash", None)  # of Xet's servers, which the hub names, the client bounds no download
    limit = parse_ratelimit_headers(headers)
    if max(limit.reset_in_seconds if limit else 0, _http._parse_retry_after(headers) or 0) > _LONGEST_WAIT:
        for name in ("RateLimit", "Retry-After"):  # without them the client tries five times, and gives up
            headers.pop(name, None)
    commit, etag = headers.get("X-Repo-Commit"), headers.get("X-Linked-Etag") or headers.get("ETag")
    if answer.request.method != "HEAD" or commit is None:  # without a commit the client takes nothing
        return
    wrong = [commit] if not _COMMIT.fullmatch(commit) else []
    if wrong or (answer.status_code < 400 and etag is not None and not _ETAG.fullmatch(etag)):
        raise ConfigError(
            f"{answer.url}: the hub announces {shortened((wrong or [etag])[0], LONGEST_NAME)!r} where a hash belongs; "
            "nothing was written. Let HF_ENDPOINT name a hub or mirror that announces SHA-1 or SHA-256, or unset it"
        )


@cache
def _reach(endpoint: str) -> None:
    """Wait for a hub's answer; a LocalEntryNotFoundError soon: the client tries for half a minute."""
    try:
        huggingface_hub.get_session().head(endpoint, timeout=_SECONDS)
    except Exception as error:  # of the client or the network
        raise LocalEntryNotFoundError(f"{endpoint} cannot be reached") from error


def _bounded_bar(where: str, size: int | None) -> type[Any]:
    """Return a progress bar that ends a download above its size; None = the announced one."""

    class Bar(tqdm):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.left = (options["total"] or 0) if size is None else size
            self.is_bound = "bar_format" not in options  # else one of Xet's two, which counts other bytes too

        def update(self, n: float | None = 1) -> bool | None:
            self.left -= int(n or 0)
            if self.is_bound and self.left < 0:
                raise ConfigError(
                    f"{where}: more came than the {size} bytes that the hub announced; it was removed. Look for a "
                    "proxy or mirror (HF_ENDPOINT) that changes files"
                )
            return super().update(n)

    return Bar


def free_bytes(folder: Path | None = None) -> tuple[Path, int]:
    """Return a folder, that of the hub's cache where none is given, and how much room its disk has."""
    folder = (folder or Path(constants.HF_HUB_CACHE).expanduser()).absolute()
    return folder, shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def unavailable(origin: str, error: Exception) -> ConfigError:
    """Return what a user reads of an error of the client; `origin` is the key with its value."""
    if isinstance(error, ConfigError):
        return ConfigError(f"{origin}: {error}")
    if type(error).__name__ == "LocalEntryNotFoundError" and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the hub could not be asked
    response = getattr(error, "response", None)
    names = [kind.__name__ for kind in type(error).__mro__]
    status = getattr(response, "status_code", None) or getattr(error, "code", None)  # of the client, or of urllib
    remedy = next((_REMEDIES[name] for name in names if name in _REMEDIES), _ANSWERED if status else _REMEDY)
    if status == 429:
        remedy = _TOO_MANY
    if getattr(error, "errno", None) == errno.ENOSPC:
        remedy = "free space there, or set HF_HOME to a folder on another disk"
    source = parse_source(origin.partition("=")[2])
    url = "" if source is None else f"https://huggingface.co/{source.repo}"
    reason = (str(error).splitlines() or [""])[0]
    return ConfigError(
        f"{origin}: not a path, and the download from the hub failed ({names[0]}: {reason}); {remedy.format(url=url)}"
    )


def push_folder(folder: Path, repo: str, *, private: bool, names: Sequence[str]) -> str:
    """Upload files of a folder that match `names` to a repository, and return its address."""
    try:
        api = huggingface_hub.HfApi()
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=list(names),
            ignore_patterns=f"*{RECORD}",
            commit_message="Upload by cascade-train",
        )
    except Exception as error:  # of the client or the network
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"push={repo}: the hub did not take it ({type(error).__name__}: {first}); {_LOG_IN} with a token that may "
            f"write there. What was written lies in {folder}."
        ) from error
    return str(url)
