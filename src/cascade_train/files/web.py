"""Files of the web that have one content for ever: their address and hash, and how they get here, checked.

They lie where torch.hub keeps what it fetches, so that what other libraries have fetched is not fetched again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from cascade_train.errors import ConfigError
from cascade_train.files.durable import replacing

SECONDS = 60.0
"""How long an address may say nothing."""

BLOCK = 2**20


@dataclass(frozen=True)
class WebFile:
    """A file by its address and the SHA-256 of its content, 64 hex digits."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        """Its name."""
        return self.url.rpartition("/")[2]

    @property
    def path(self) -> Path:
        """Where it lies, or would: torch.hub's folder, which TORCH_HOME or XDG_CACHE_HOME moves."""
        caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        home = Path(os.environ.get("TORCH_HOME", f"{caches}/torch")).expanduser()
        return home.absolute() / "hub" / "checkpoints" / self.name

    def size(self) -> int:
        """Return its bytes, of what is here, else as its address announces, 0 = it does not; an OSError if it fails."""
        if self.path.is_file():
            return self.path.stat().st_size
        with urllib.request.urlopen(self.url, timeout=SECONDS) as answer:
            return int(answer.headers.get("Content-Length") or 0)

    def free_bytes(self) -> int:
        """Return how much room the disk has where it goes."""
        return shutil.disk_usage(next(each for each in self.path.parents if each.exists())).free

    def fetch(self) -> Path:
        """Return its path, checked against its hash; downloaded if it is not there, or damaged.

        Raises:
            ConfigError: what came is another content; it is not kept.
            OSError: it cannot be had.
        """
        if self.path.is_file():
            with self.path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == self.sha256:
                    return self.path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as beside:
            found = self._download(beside)
            if found != self.sha256:
                raise ConfigError(
                    f"{self.url}: what came has the SHA-256 {found[:12]}…, not {self.sha256[:12]}…, and was removed; "
                    "download it again, and if that does not help, look for a proxy that changes files"
                )
        return self.path

    def _download(self, target: Path) -> str:
        """Write the content to a file, and return its SHA-256; at most what its address announces."""
        digest = hashlib.sha256()
        with urllib.request.urlopen(self.url, timeout=SECONDS) as answer, target.open("wb") as file:
            left = int(answer.headers.get("Content-Length") or 0)
            while block := answer.read(min(BLOCK, left)):
                left -= len(block)
                digest.update(block)
                file.write(block)
        return digest.hexdigest()
