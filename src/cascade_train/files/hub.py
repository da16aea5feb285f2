"""Places on the hub, and downloads and uploads by its own client."""

from __future__ import annotations

import errno
import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import DryRunFileInfo, constants
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from cascade_train.errors import ConfigError
from cascade_train.files.output import RECORD

_SOURCE = re.compile(r"(?!.*\.\.)(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<inside>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOG_IN = "log in (hf auth login, or HF_TOKEN in the environment)"
_REMEDIES = {
    "GatedRepoError": f"accept its terms at {{url}}, then {_LOG_IN}",
    "RepositoryNotFoundError": f"check the name; if it is private, {_LOG_IN}",
    "RevisionNotFoundError": "name another revision behind the @, such as @main, or none",
    "RemoteEntryNotFoundError": "check the name of the file, or name another revision behind an @",
    "FileMetadataError": "check proxies and HF_ENDPOINT, which has to name a hub or mirror, or give a local path",
    "HfHubHTTPError": f"try again later, check proxies and HF_ENDPOINT, {_LOG_IN}, or give a local path",
}
"""What helps against errors of the client, by their classes."""

_REMEDY = "check the name, download it where there is a network (cascade-train download), or give a local path"

logging.getLogger("huggingface_hub").handlers.clear()  # its messages go through ours, which hide secrets


@dataclass(frozen=True)
class HubSource:
    """`owner/name[@revision][:inside]`: a repository, its commit, tag or branch, a folder or file."""

    repo: str
    revision: str | None
    inside: str

    @property
    def commit(self) -> str | None:
        """The named commit, or the cached one of the branch or tag; None = unknown."""
        revision = self.revision or "main"
        if _COMMIT.fullmatch(revision):
            return revision
        ref = self._cache() / "refs" / revision
        named = ref.read_text().strip() if ref.is_file() else ""
        return named if _COMMIT.fullmatch(named) else None

    @property
    def asked(self) -> str:
        """The revision to request: the named one, else the cached commit of `main`, of the first download."""
        return self.revision or self.commit or "main"

    def folder(self) -> Path | None:
        """Folder of that commit in the cache; None = there is none."""
        path = self._cache() / "snapshots" / (self.commit or "-")
        return path if path.is_dir() else None

    def _cache(self) -> Path:
        return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{self.repo.replace('/', '--')}"

    def look(self, name: str, *, cached_only: bool = False) -> DryRunFileInfo | None:
        """Size and place of a file without its content; None = the repository has none of that name.

        A LocalEntryNotFoundError where it is not in the cache and the hub cannot be asked, or another of the client.
        """
        try:
            return huggingface_hub.hf_hub_download(
                self.repo, name, revision=self.asked, local_files_only=cached_only, dry_run=True
            )
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return None

    def fetch(self, name: str) -> Path:
        """Path of a file in the cache, downloaded if it is not there; an error of the client where it cannot be had."""
        return Path(huggingface_hub.hf_hub_download(self.repo, name, revision=self.asked))


def parse_source(source: str) -> HubSource | None:
    """What a text names on the hub; None = it has not that form."""
    match = _SOURCE.fullmatch(source)
    return match and HubSource(match["repo"], match["revision"], match["inside"] or "")


def announced_hash(path: Path) -> str | None:
    """The hub's SHA-256 of a large cached file, after which the client names its content; None = unknown."""
    name = path.readlink().name if path.is_symlink() else ""
    return name if re.fullmatch(r"[0-9a-f]{64}", name) else None


def free_bytes(folder: str) -> int:
    """Room on the disk of a folder, which need not be there yet."""
    path = Path(folder).expanduser().absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def unavailable(origin: str, error: Exception) -> ConfigError:
    """What a user reads of an error of the client; `origin` is the key with its value."""
    if type(error) is LocalEntryNotFoundError and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the hub could not be asked
    names = [kind.__name__ for kind in type(error).__mro__]
    remedy = next((_REMEDIES[name] for name in names if name in _REMEDIES), _REMEDY)
    if getattr(error, "errno", None) == errno.ENOSPC:
        remedy = "free space there, or set HF_HOME to a folder on another disk"
    source = parse_source(origin.partition("=")[2])
    remedy = remedy.format(url="" if source is None else f"https://huggingface.co/{source.repo}")
    reason = (str(error).splitlines() or [""])[0]
    return ConfigError(f"{origin}: not a path, and the download from the hub failed ({names[0]}: {reason}); {remedy}")


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
